// A TrainPlan for people and for programs, and compared with what a run measured.
#pragma once

#include <string>
#include <vector>

#include "engine/meta.h"
#include "tools/io/jsonl.h"
#include "tools/planning/plan_memory.h"
#include "tools/planning/planner.h"

namespace tessera::tools {

/// "100 GFLOP/s, 10 GB/s of memory and 10 GB/s between ranks", and those of the host for plans that
/// offload.
std::string rates_text(const engine::MetaRates& rates, bool uses_host);
/// Lines: memory by category with its arithmetic.
std::vector<std::string> memory_lines(const TrainPlan& plan);
/// Lines: the categories that hold most of its peak, each with its largest terms.
std::vector<std::string> largest_lines(const TrainPlan& plan);
/// Lines: memory by category with its arithmetic, traffic, collectives in order, simulated time.
std::vector<std::string> plan_lines(const TrainPlan& plan, const PlanTarget& target);
/// Why a rank sends what it sends in a step: a term for collectives of units that are called alike.
std::vector<PlanTerm> sent_terms(const TrainPlan& plan);
/// How many bytes a process sends to others in a step, on average; 0 in one process.
std::int64_t bytes_between(const TrainPlan& plan);
/// The figures of plan_lines() as one JSON object.
JsonRecord plan_record(const TrainPlan& plan, const PlanTarget& target);

}  // namespace tessera::tools
