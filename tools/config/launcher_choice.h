// Who starts the processes of a training, as --parallel.launcher names it.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace tessera::tools {

enum class LauncherChoice {
  kAuto,     ///< whoever set the variables of this process's environment
  kThreads,  ///< nobody: this process is the only one
  kTorchrun,
  kSlurm,    ///< srun
  kOpenMpi,  ///< Open MPI's mpirun
  kHydra,    ///< mpirun and mpiexec of MPICH, Intel MPI and MVAPICH
  kEnv,      ///< a person or Kubernetes, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
};
inline constexpr std::array<std::pair<std::string_view, LauncherChoice>, 7> kLauncherChoices = {
    {{"auto", LauncherChoice::kAuto},
     {"threads", LauncherChoice::kThreads},
     {"torchrun", LauncherChoice::kTorchrun},
     {"slurm", LauncherChoice::kSlurm},
     {"openmpi", LauncherChoice::kOpenMpi},
     {"hydra", LauncherChoice::kHydra},
     {"env", LauncherChoice::kEnv}}};

constexpr std::string_view name_of(LauncherChoice choice) {
  return std::ranges::find(kLauncherChoices, choice,
                           &std::pair<std::string_view, LauncherChoice>::second)
      ->first;
}

}  // namespace tessera::tools
