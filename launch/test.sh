#!/usr/bin/env bash
# Everything that must be right before a change lands: lint, format, types, import layers, tests. launch/test.sh [arguments of pytest]
# With COVERAGE=1 also the lines of harness/ that ran, in any process.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
install_all test || exit
cd "$root" || exit

failed=()
run() {
    echo "== $*"
    "$@" || failed+=("$*")
}
bin="$(dirname "$python")"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# What tests start finds our modules compiled.
unset PYTHONDONTWRITEBYTECODE
# What is compiled at its first use, modules and DeepSpeed's operators, is compiled now, beside what takes one core. The operator that only
# offloading needs takes longest, and is compiled beside the first tests, which leave a third of two cores idle.
(
    "$python" -c "import accelerate.commands.launch, datasets, deepspeed, peft, torch.distributed.run, transformers.trainer, trl"
    "$python" -m harness.compile_ahead $$ ShareMemCommBuilder
) > /dev/null 2>&1 &
compiling=$!
run "$bin/ruff" check .
run "$bin/ruff" format --check .
run "$bin/mypy"
run "$bin/lint-imports"
run "$python" launch/audit.py
wait "$compiling"
"$python" -m harness.compile_ahead $$ CPUAdamBuilder > /dev/null 2>&1 &
measure=()
if [ -n "${COVERAGE:-}" ]; then
    # Ranks have working folders of their own.
    export COVERAGE_FILE="$root/.coverage" COVERAGE_RCFILE="$root/setup.cfg"
    measure=(-m coverage run)
fi
run "$python" "${measure[@]}" -m pytest -n 2 --dist loadscope "$@"
if [ -n "${COVERAGE:-}" ]; then
    "$python" -m coverage combine --quiet && "$python" -m coverage report --skip-covered --sort=cover
fi
if [ "${#failed[@]}" -ne 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
