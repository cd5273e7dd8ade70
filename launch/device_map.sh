#!/usr/bin/env bash
# one process, a device map over all GPUs: launch/device_map.sh [--dry_run] [arguments of harness/run_clm.py]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
find_python || exit
exec "$python" "$root/launch/run.py" --engine device_map "$@"
