"""Finds the launchers of MPI that tests start. Programs need none to be built: they load MPI when they are asked for it.

    @local_mpi//:defs.bzl  OPENMPI_FOUND, MPICH_FOUND: Debian's openmpi-bin and mpich
"""

def _mpi_configure_impl(ctx):
    bin = ctx.path("/usr/bin")
    ctx.file("defs.bzl", "OPENMPI_FOUND = %s\nMPICH_FOUND = %s\n" % tuple([
        bin.get_child("mpirun." + name).exists
        for name in ["openmpi", "mpich"]
    ]))
    ctx.file("BUILD")

mpi_configure = repository_rule(
    implementation = _mpi_configure_impl,
    configure = True,
    local = True,
)
