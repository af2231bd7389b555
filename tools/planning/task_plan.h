// What the options plan, audit and memory_budget ask of a task before its ranks start.
#pragma once

#include <string>
#include <vector>

#include "engine/gemm/gemm_cuda.h"
#include "tools/launch/ranks.h"
#include "tools/planning/planner.h"
#include "tools/train/task.h"

namespace tessera::tools {

/// Where `rank` of `ranks` of `config` runs, for the planner.
PlanTarget plan_target(const Ranks& ranks, const TrainConfig& config, int rank = 0);

/// Of a prepared task, without its budget. `trace`: see make_plan().
TrainPlan plan_task(const Task& task, const Ranks& ranks, int rank = 0,
                    TraceWriter* trace = nullptr);

/// The matrix products of a rank's steps on a GPU, each once. Of a prepared task.
std::vector<engine::DeviceProduct> gemms_of(const Task& task, const Ranks& ranks);

/// Changes the configuration of a prepared task so that its plan fits memory_budget, if it has one.
/// The lines that say how; empty without. Throws InvalidArgument if nothing fits.
std::vector<std::string> fit_task(Task& task, const Ranks& ranks);

}  // namespace tessera::tools
