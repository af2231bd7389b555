#include "tools/programs/run/run_start.h"

#include <utility>

#include "tools/config/replicas.h"
#include "tools/launch/cpu.h"
#include "tools/launch/launch_warnings.h"
#include "tools/machine/environment.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/run/memory_check.h"
#include "tools/programs/run/run_checks.h"
#include "tools/train/checkpoint_folder.h"
#include "tools/train/graph_choice.h"

namespace tessera::tools {

RunStart prepare_run(const FlagSet& flags, Task& task, const Launch& launch) {
  const TrainConfig& config = std::as_const(task).config();
  if (launch.process == 0) check_resumed_folder(config.checkpoint);
  RunStart start;
  if (!config.plan) start.warnings = launch_warnings(environment(), launch, config);
  start.ranks = Ranks::choose(config, launch);
  const Ranks& ranks = start.ranks;
  ranks.place(task.config().parallel);
  check_run(config, flags, ranks);
  if (!config.plan)
    check_pins(config.cpu, ranks.local.num_on_host);  // a plan may be of another machine
  task.prepare(flags, ranks.num_gpus > 0);
  start.graph = graph_line(config, ranks.size, ranks.num_gpus > 0);  // data have a say in it
  start.budget_lines = fit_task(task, ranks);
  if (std::string line = replicas_warning(config, ranks.size); !line.empty()) {
    start.warnings.push_back(std::move(line));
  }
  start.shortage = check_shortage(memory_shortage(task, ranks), config);
  return start;
}

}  // namespace tessera::tools
