// Messages between processes over MPI: Open MPI, MPICH and its kin, or any library of the MPI 5
// standard ABI. It is loaded when it is asked for, and building takes none.
// MPI moves messages only while it is called: whoever waits for one calls it, and sleeps between
// its calls once it has waited for a while.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace tessera::comm {

/// Which libraries are looked for.
enum class MpiFamily {
  kAny,         ///< Open MPI first
  kOpenMpi,     ///< of Open MPI's mpirun
  kMpich,       ///< of Hydra, which starts MPICH, Intel MPI and MVAPICH
  kMpichFirst,  ///< any, those of kMpich first: of who speaks PMI 1 or 2, as `srun --mpi=pmi2`
};

struct MpiOptions {
  std::string library_path = {};  ///< empty: the MPI that this process has, else one of `family`
  MpiFamily family = MpiFamily::kAny;
  /// How long the start and the end wait for the other processes.
  std::chrono::milliseconds deadline = std::chrono::minutes(1);
  /// Longer messages are cut, for MPI's counts are ints. Equal in all processes.
  std::size_t chunk_nbytes = std::size_t{1} << 30;
};

/// The end of this process. Collective, once in a process: MPI cannot be started again. Where the
/// program has started MPI itself, with MPI_THREAD_MULTIPLE, that is shared.
///
/// Compare num_processes() with what the launcher says: under the launcher of another MPI it is 1
/// in each process, without any error.
///
/// Throws DeviceError that names what was looked for if there is no MPI; CommError if it does not
/// start; InvalidArgument for the options.
///
/// Its end waits for that of the other processes (MPI_Finalize), unless it has given up, messages
/// are on their way, or it ends by an exception: then the world has failed, and MPI is left as it
/// is until the process ends. What those messages own stays.
std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options = {});

}  // namespace tessera::comm
