// A launcher of processes for comparisons, which needs no other program: it sets the variables of
// torchrun.
#pragma once

#include <filesystem>
#include <string>

#include "tests/testing/temp_folder.h"

namespace tessera::testing {

/// A script in `folder`: NAME N PROGRAM starts N processes, whose numbers it leaves in the file
/// "pids", waits for all, and ends with the code of one that failed. `at_signal`: what it does at
/// SIGTERM; it takes no notice of SIGINT. Its processes have sessions of their own, so that only it
/// and whoever knows them reaches them.
inline std::string launcher_script(const TempFolder& folder, const std::string& name = "launch",
                                   const std::string& at_signal = "kill $pids") {
  namespace fs = std::filesystem;
  const std::string path = folder.write(
      name, "#!/bin/bash\nn=$1; shift\ntrap '" + at_signal +
                "' TERM\ntrap : INT\nexport LD_LIBRARY_PATH=" + fs::absolute("comm").string() + R"(
export TORCHELASTIC_RUN_ID=compare.$$ WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n
export GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
for p in $(seq 0 $((n - 1))); do
  RANK=$p LOCAL_RANK=$p setsid "$@" &
  pids="$pids $!"
done
echo $pids >> $(dirname $0)/pids
for pid in $pids; do wait $pid || code=$?; done
exit ${code:-0}
)");
  fs::permissions(path, fs::perms::owner_all);
  return path;
}

}  // namespace tessera::testing
