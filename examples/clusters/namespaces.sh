#!/bin/bash
# Two hosts on one machine, as root: network namespaces with names and an /etc/hosts of their own,
# connected by a link that can be cut.
#
#   namespaces.sh gloo     one training over Gloo
#   namespaces.sh mpi      one training by Open MPI, whose mpirun reaches h2 without ssh
#   namespaces.sh cut      over Gloo, and in the middle of it the link goes down
#   namespaces.sh silent   over Gloo, and in the middle of it packets are dropped without a word
#   namespaces.sh lossy    over Gloo, where 2 packets of 100 are lost
#
# The last three go over Open MPI with a second word: namespaces.sh cut mpi. RATE=1gbit limits what each host sends.
if [ "${1:-}" = on ]; then  # namespaces.sh on HOST COMMAND: what mpirun calls in place of ssh
  host=$2 && shift 2
  exec ip netns exec "tessera-$host" unshare --uts --mount sh -c \
    "hostname $host; mount --bind '$CLUSTER_HOSTS' /etc/hosts; exec $*"
fi
if [ "${1:-}" = noted ]; then  # namespaces.sh noted COMMAND: leaves what a process of mpirun says where a cut does not matter
  shift
  exec > "$CLUSTER_NOTES.$OMPI_COMM_WORLD_RANK" 2>&1
  "$@"
  echo "rank $OMPI_COMM_WORLD_RANK: exit code $? at $(date +%T.%1N)"
  exit
fi
case ${1:?} in cut | silent) STEPS=100000 EVERY=100 ;; esac
. "$(dirname "$0")/common.sh"
on="$PWD/examples/clusters/namespaces.sh on"
what=$1 && shift
transport=gloo
case $what,${1:-} in
  mpi,*) transport=mpi ;;
  *,mpi) transport=mpi && shift ;;
esac

export CLUSTER_HOSTS=$out/hosts TESSERA_SECRET=${TESSERA_SECRET:-$(openssl rand -hex 32)}
printf '127.0.0.1 localhost\n10.77.0.1 h1\n10.77.0.2 h2\n' > "$CLUSTER_HOSTS"
trap 'ip netns del tessera-h1; ip netns del tessera-h2' EXIT
for k in 1 2; do ip netns add tessera-h$k; done
ip link add tessera-v1 netns tessera-h1 type veth peer name tessera-v2 netns tessera-h2
for k in 1 2; do
  ip -n tessera-h$k addr add 10.77.0.$k/24 dev tessera-v$k
  ip -n tessera-h$k link set lo up
  ip -n tessera-h$k link set tessera-v$k up
  [ -z "${RATE:-}" ] || tc -n tessera-h$k qdisc add dev tessera-v$k root tbf rate "$RATE" burst 256kb latency 50ms
done
if [ "$what" = lossy ]; then
  for k in 1 2; do
    ip netns exec tessera-h$k nft -f - <<NFT
table inet loss {
  chain in { type filter hook input priority 0; iifname "tessera-v$k" numgen random mod 100 < 2 counter drop; }
}
NFT
  done
fi

start() {  # start RANK ARGUMENT...: rank 0 on h1, rank 1 on h2
  local rank=$1 && shift
  $on h$((rank + 1)) env RANK=$rank WORLD_SIZE=2 MASTER_ADDR=h1 MASTER_PORT=29600 "${train[@]}" "$@"
  echo "rank $rank: exit code $? at $(date +%T.%1N)"
}
start_mpi() {  # start_mpi COMMAND: by mpirun on h1
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  # --bind-to none: each of the two hosts would give its rank the first core.
  $on h1 mpirun --mca plm_rsh_agent "'$on'" --bind-to none --host h1:1,h2:1 -np 2 "$@"
}
cut_link() {  # after some steps
  sleep 5
  echo "cut at $(date +%T.%1N)"
  case $what in
    cut) ip -n tessera-h2 link set tessera-v2 down ;;
    silent)
      ip netns exec tessera-h2 nft -f - <<'NFT' ;;
table inet cut {
  chain in { type filter hook input priority 0; iifname "tessera-v2" drop; }
  chain out { type filter hook output priority 0; oifname "tessera-v2" drop; }
}
NFT
  esac
}
set +e
case $transport,$what in
  gloo,*)
    start 0 "$@" & start 1 "$@" &
    case $what in cut | silent) cut_link ;; esac
    wait
    ;;
  mpi,cut | mpi,silent)
    export CLUSTER_NOTES=$out/notes
    start_mpi "$PWD/examples/clusters/namespaces.sh" noted "${train[@]}" "$@" &
    cut_link
    until grep -qs 'exit code' "$CLUSTER_NOTES.0" && grep -qs 'exit code' "$CLUSTER_NOTES.1"; do sleep 0.1; done
    cat "$CLUSTER_NOTES".[01]
    # It has not noticed, and waits on.
    kill -9 $(ip netns pids tessera-h1; ip netns pids tessera-h2)
    wait 2> /dev/null
    ;;
  mpi,*) start_mpi "${train[@]}" "$@" ;;
esac
