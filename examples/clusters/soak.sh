#!/bin/bash
# A long training by processes of this host, which hold at its end what they held at its beginning:
#
#   soak.sh gloo      two processes over Gloo
#   soak.sh openmpi   two of Open MPI
#   soak.sh mpich     two of MPICH
#   soak.sh hybrid    two with two ranks each, over Gloo
#
# Prints the descriptors, threads and resident memory of each process after 500 steps and after 10000, or STEPS. Ends with 1 if
# a process has other numbers of descriptors or threads then, or more memory than the steps explain: 512 KiB, and in process 0,
# which keeps figures of each step for its summary, 256 bytes a step; or if other calls were made in the last thousand steps than in
# an earlier one.
case ${1:-} in
  gloo | openmpi | mpich | hybrid) ;;
  *) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
steps=${STEPS:-10000}
STEPS=$((steps + 500)) EVERY=0 LAYERS=2  # the processes are looked at while they train on
. "$(dirname "$0")/common.sh"
what=$1 && shift
train+=(--model.dim=32 --model.heads=2 --model.seq=32 --train.batch=2 --parallel.prefetch=2 --log.peak_ms=0 "$@")
program=$(readlink -f "$program")

case $what in
  gloo | hybrid)
    if [ "$what" = hybrid ]; then train+=(--parallel.threads=2); fi
    for rank in 0 1; do
      RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29700} \
        "${train[@]}" &
    done
    ;;
  openmpi)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    mpirun.openmpi -n 2 --bind-to none --oversubscribe "${train[@]}" &
    ;;
  mpich) mpirun.mpich -n 2 "${train[@]}" & ;;
esac

# after_step N: waits until the log has that step.
after_step() {
  until [ "$(tail -n 1 "$out/log.jsonl" 2>/dev/null | sed -n 's/^{"step":\([0-9]*\),.*/\1/p')" -ge "$1" ] 2>/dev/null; do
    [ -n "$(jobs -r)" ] || { echo "expected $1 steps, got an end before" >&2 && exit 1; }
    sleep 0.1
  done
}
# For each process a line: its number, descriptors, threads, KiB of resident memory.
holdings() {
  local pid rank
  for pid in $(pgrep -f -- "--out=$out"); do
    [ "$(readlink "/proc/$pid/exe")" = "$program" ] || continue
    rank=$(tr '\0' '\n' < "/proc/$pid/environ" | sed -n 's/^\(RANK\|OMPI_COMM_WORLD_RANK\|PMI_RANK\)=//p' | head -n 1)
    echo "$rank $(ls "/proc/$pid/fd" | wc -l) $(ls "/proc/$pid/task" | wc -l) $(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")"
  done | sort -n
}
after_step 500
before=$(holdings)
after_step "$steps"
after=$(holdings)
wait || exit
# calls FROM: of a thousand steps, how many have made as many collectives and sent as many bytes.
calls() {
  sed -n 's/^{"step":\([0-9]*\),.*"num_collectives":\([0-9]*\),"sent_bytes":\([0-9]*\),.*/\1 \2 collectives, \3 bytes of rank 0/p' "$out/log.jsonl" |
    awk -v from="$1" '$1 > from && $1 <= from + 1000 { $1 = "steps of"; print }' | sort | uniq -c
}
calls $((steps - 1000))
[ "$(calls 500)" = "$(calls $((steps - 1000)))" ] || { echo "expected the calls of steps 501 to 1500, got others" >&2 && exit 1; }
[ "$(wc -l <<< "$before")" = 2 ] || { echo "expected two processes, got: $before" >&2 && exit 1; }
join <(echo "$before") <(echo "$after") | awk -v steps="$steps" '
  {
    more = $7 - $4
    printf "process %d: %d descriptors, %d threads, %d KiB after 500 steps; %d, %d, %d KiB after %d: %+d KiB\n", \
      $1, $2, $3, $4, $5, $6, $7, steps, more
    if ($2 != $5 || $3 != $6 || more > 512 + ($1 == 0 ? steps / 4 : 0)) bad = 1
  }
  END { if (bad || NR != 2) { print "expected equal numbers, and little more memory"; exit 1 } }'
