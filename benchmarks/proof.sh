#!/usr/bin/env bash
# What a doubter runs in ten minutes, on GPUs or without: one rank runs out of memory in mid-run. What becomes of the job with
# transformers' Trainer, with its auto_find_batch_size, and with this harness? proof.sh [--output folder] [options of proof.py]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" "$root/benchmarks/proof.py" "$@"
