#!/bin/bash
# One training by two processes of Open MPI on this host.
. "$(dirname "$0")/common.sh"
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# A rank computes with one thread: let the system place it, and let there be more ranks than cores.
exec mpirun -n "${RANKS:-2}" --bind-to none --oversubscribe "${train[@]}" "$@"
