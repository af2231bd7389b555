// What is found out about a run before any of its ranks starts: where they will be, and whether it
// can be done as it was asked for.
#pragma once

#include <string>
#include <vector>

#include "tools/cli/flags.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/train/task.h"

namespace tessera::tools {

struct RunStart {
  Ranks ranks;
  std::vector<std::string> warnings = {};  ///< a line each
  std::string shortage = {};               ///< of memory; empty: none
  std::vector<std::string> budget_lines = {};
  std::string graph = {};  ///< see graph_line()
};

/// For a task whose `flags` were parsed and hold together, in a process that `launch` tells of:
/// prepares it, and fits it into a memory budget if it has one. Changes no file. Throws for what
/// cannot be honoured here, which differs from process to process.
RunStart prepare_run(const FlagSet& flags, Task& task, const Launch& launch);

}  // namespace tessera::tools
