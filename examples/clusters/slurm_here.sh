#!/bin/bash
# Debian's Slurm with two nodes on this machine, as root and for a try, in which a command runs:
#
#   slurm_here.sh srun -N2 --ntasks-per-node=2 PROGRAM ...
#
# Without a command: a shell. It sees processes, ports and /run of its own, and all ends with it. First:
#   apt-get install slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins
#   apt-get install libpmix-dev   # for srun --mpi=pmix
set -euo pipefail
if [ "${SLURM_HERE:-}" != inside ]; then
  SLURM_HERE=inside exec unshare --mount --pid --net --fork --mount-proc --kill-child "$0" "$@"
fi
unset SLURM_HERE
mount -t tmpfs none /run
folder=/run/slurm
mkdir -p "$folder/state" "$folder/spool" /run/munge
# An address besides loopback's: Slurm looks up no names without.
ip link set lo up && ip addr add 10.77.0.1/32 dev lo
printf '127.0.0.1 localhost h1 h2\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=localhost
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/ctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/ctld.log
SlurmdLogFile=$folder/%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=3
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=h1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16818 CPUs=2 State=UNKNOWN
NodeName=h2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16819 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=h1,h2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
chown munge: /run/munge
su -s /bin/sh munge -c munged
slurmctld && slurmd -N h1 && slurmd -N h2
for _ in $(seq 50); do
  [ "$(sinfo -h -t idle -o %D)" = 2 ] && break
  sleep 0.2
done
"${@:-bash}"
