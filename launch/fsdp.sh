#!/usr/bin/env bash
# FSDP2 through accelerate: launch/fsdp.sh [--config fsdp_configs/full_shard.yaml] [--num_gpus N] [--dry_run] [arguments of harness/run_clm.py]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_python || exit
exec "$python" "$root/launch/run.py" --engine fsdp "$@"
