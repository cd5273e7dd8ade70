#!/usr/bin/env bash
# DDP through torchrun: launch/ddp.sh [--num_gpus N] [--dry_run] [arguments of harness/run_clm.py]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_python || exit
exec "$python" "$root/launch/run.py" --engine ddp "$@"
