#!/usr/bin/env bash
# DeepSpeed ZeRO: launch/deepspeed.sh [--config ds_configs/zero3.json] [--num_gpus N] [--dry_run] [arguments of harness/run_clm.py]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_python || exit
exec "$python" "$root/launch/run.py" --engine zero3 "$@"
