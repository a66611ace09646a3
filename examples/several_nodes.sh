#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Stages on several nodes. Each command keeps running until Ctrl-C; one a terminal.
#
#   several_nodes.sh head                          on one node
#   RAY_AUTH_TOKEN=... several_nodes.sh join IP    on each other; IP is the first one's
#   RAY_AUTH_MODE=token RAY_ADDRESS=IP:6379 python examples/offline.py
#
# and the last one on the first node. `ray get-auth-token` there shows the token, which
# Ray wants on every node. `LLM`, and `spexis serve` alike, run their stages on the nodes
# of the cluster at RAY_ADDRESS and leave it alive. PORT is 6379 unless set. Ray counts a
# node's GPUs by itself; one without says how many stages it takes, STAGES, else one.
set -euo pipefail

export RAY_AUTH_MODE=token
options=(--block --disable-usage-stats)
if ! nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
    options+=(--num-gpus 0 --resources "{\"spexis_stage\": ${STAGES:-1}}")
fi
case "${1:-}" in
head)
    ray get-auth-token --generate >/dev/null # unless there is one
    exec ray start --head --port "${PORT:-6379}" --include-dashboard=false "${options[@]}"
    ;;
join) exec ray start --address "${2:?the head node\'s address}:${PORT:-6379}" "${options[@]}" ;;
*)
    sed -n '3,12s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
