#!/usr/bin/env bash
# Everything that must be right before a change lands: lint, format, types, import layers, tests. launch/test.sh [arguments of pytest]
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
run "$bin/ruff" check .
run "$bin/ruff" format --check .
run "$bin/mypy"
run "$bin/lint-imports"
run "$python" launch/audit.py
run "$python" -m pytest -n 2 --dist loadscope "$@"
if [ "${#failed[@]}" -ne 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
