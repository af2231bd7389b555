// What the configurations plan, and which of them plan the very same steps.
//
// [Note: what cannot differ] A strategy, or an option of the schedule, may have nothing to act on:
// gathers ahead where nothing is gathered, a memory budget that all fits, zero1 and zero2 on one
// rank. Then two configurations make the same calls in the same order with the same memory, and
// training both would measure noise. They are found by their plans, which the trainer itself makes,
// not by a list of rules. What a plan does not see (threads, pins, traces) is trained.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/request/request.h"
#include "tools/planning/plan_table.h"
#include "tools/planning/planner.h"

namespace tessera::tools {

/// All that a plan says of its steps: calls, times, memory. Equal steps have equal texts.
std::string text_of_steps(const TrainPlan& plan);

/// Plans every configuration, and sets what is fitted, and same_plan_as of those whose plan an
/// earlier one has. Throws, with its name, what its training would before its first step, or that
/// no plan meets its memory_budget. Chooses this process's CPU, after which no request for another
/// one can be read.
void check_plans(Request& request);

/// A row for every configuration, with what its memory_budget makes of it; for Request::only_plans.
/// Chooses this process's CPU. Throws, with its name, what a training would before its first step.
std::vector<PlanRow> plan_rows(const Request& request);

}  // namespace tessera::tools
