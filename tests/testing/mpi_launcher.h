// The launchers of MPI that tests start: Debian's, where they are installed.
#pragma once

#include <filesystem>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::testing {

struct MpiLauncher {
  std::string name;  ///< of its MPI, in names of tests
  std::string program;
  std::string version;               ///< how its MPI's version begins
  std::string library;               ///< its MPI's, as the loader finds it
  std::vector<std::string> options;  ///< for more ranks than cores
  /// For not ending all other processes once one has failed. None: it ends them within moments,
  /// and they may have no time to say why.
  std::vector<std::string> leave_others_alone;

  friend std::ostream& operator<<(std::ostream& out, const MpiLauncher& launcher) {
    return out << launcher.program;
  }
};

inline const MpiLauncher& open_mpi() {
  static const MpiLauncher launcher = {
      .name = "openmpi",
      .program = "/usr/bin/mpirun.openmpi",
      .version = "Open MPI ",
      .library = "libmpi.so.40",
      .options = {"--oversubscribe", "--bind-to", "none", "--quiet"},
      .leave_others_alone = {"--enable-recovery"}};
  return launcher;
}
inline const MpiLauncher& mpich() {
  static const MpiLauncher launcher = {.name = "mpich",
                                       .program = "/usr/bin/mpirun.mpich",
                                       .version = "MPICH ",
                                       .library = "libmpich.so.12",
                                       .options = {},
                                       .leave_others_alone = {}};
  return launcher;
}

/// Those that are installed.
inline std::vector<MpiLauncher> mpi_launchers() {
  std::vector<MpiLauncher> installed;
  for (const MpiLauncher& launcher : {open_mpi(), mpich()}) {
    if (std::filesystem::exists(launcher.program)) installed.push_back(launcher);
  }
  return installed;
}

inline std::string launcher_name(const ::testing::TestParamInfo<MpiLauncher>& info) {
  return info.param.name;
}

/// Of a launcher, which as any user runs for `timeout_s` seconds at most.
inline std::map<std::string, std::string> mpi_environment(int timeout_s) {
  const std::string seconds = std::to_string(timeout_s);
  return {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
          {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
          {"MPIEXEC_TIMEOUT", seconds}};  // of Open MPI and of MPICH
}

}  // namespace tessera::testing
