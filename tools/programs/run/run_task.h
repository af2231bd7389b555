// The training program itself, whatever the task: flags, ranks, log, signals, results.
#pragma once

#include "tools/cli/flags.h"
#include "tools/train/task.h"

namespace tessera::tools {

/// Parses the command line with `flags`, which holds the program's name and is empty, trains on all
/// ranks and tells what came of it. --help and --version print and return. Throws as its parts do;
/// see run_main().
void run_task(int argc, char** argv, FlagSet flags, Task& task);

}  // namespace tessera::tools
