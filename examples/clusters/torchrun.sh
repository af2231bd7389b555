#!/bin/bash
# One training by processes that torchrun starts, over Gloo.
#
#   torchrun.sh one       two processes on this host
#   torchrun.sh two       two agents on this machine, as on two hosts: two processes each
#   torchrun.sh elastic   two agents; one is lost with its process, and the other goes on alone
[ "${1:?}" != elastic ] || STEPS=400 EVERY=100
. "$(dirname "$0")/common.sh"
what=$1 && shift
torchrun=("${TORCHRUN:-torchrun}" --no-python)
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR

agent() { exec "${torchrun[@]}" --rdzv-backend=c10d --rdzv-id="$out" --rdzv-endpoint=localhost:29500 "$@"; }
case $what in
  one) exec "${torchrun[@]}" --standalone --nproc-per-node=2 "${train[@]}" "$@" ;;
  two)
    export TESSERA_SECRET=${TESSERA_SECRET:-$(openssl rand -hex 32)}
    for _ in 1 2; do agent --nnodes=2 --nproc-per-node=2 "${train[@]}" "$@" & done
    wait
    ;;
  elastic)
    export TESSERA_SECRET=${TESSERA_SECRET:-$(openssl rand -hex 32)}
    train+=(--checkpoint.every=100 --checkpoint.keep=2 --resume=auto)
    start() {
      agent --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-conf=last_call_timeout=5 \
        "${train[@]}" "$@"
    }
    start "$@" & first=$!
    # The agent that comes first holds the store that both need, so the other one is to be killed.
    until (: </dev/tcp/localhost/29500) 2>/dev/null; do
      kill -0 "$first" || exit
      sleep 0.1
    done
    start "$@" &
    second=$!
    until grep -qs '"step":150,' "$out/log.jsonl"; do sleep 0.1; done
    echo "now the second agent and its process are killed"
    kill -9 $(pgrep -P "$second") "$second"
    wait "$first"
    ;;
esac
