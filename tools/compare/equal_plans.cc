#include "tools/compare/equal_plans.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tools/compare/request/named.h"
#include "tools/launch/ranks.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/run/memory_check.h"
#include "tools/programs/transformer_memory.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

// Whether the option `key` acts through the plan alone.
bool is_of_the_schedule(const std::string& key) {
  static const std::set<std::string> keys = {"parallel.strategy",
                                             "parallel.shard_ranks",
                                             "parallel.prefetch",
                                             "parallel.backward_prefetch",
                                             "parallel.reductions_in_flight",
                                             "parallel.reshard_after_forward",
                                             "parallel.unit_min_numel",
                                             "parallel.bucket_mb",
                                             "train.recompute",
                                             "offload.parameters",
                                             "offload.gradients",
                                             "offload.optimizer",
                                             "memory_budget"};
  return keys.contains(key);
}

bool differ_in_schedule_alone(const Configuration& a, const Configuration& b) {
  return std::ranges::all_of(b.options, [&](const auto& option) {
    const auto other = a.options.find(option.first);
    const bool is_equal = other != a.options.end() && other->second == option.second;
    return is_equal || is_of_the_schedule(option.first);
  });
}

void add_memory(std::string& text, const engine::MemoryStats& memory) {
  text += fmt::format(" {}", memory.peak_total_nbytes);
  for (const auto& nbytes : memory.peak_nbytes) text += fmt::format(" {}", nbytes);
}

void add_terms(std::string& text, const std::vector<PlannedMemory>& memory) {
  for (const PlannedMemory& m : memory) {
    text += fmt::format("\n{} {}", name_of(m.category), m.nbytes);
    for (const PlanTerm& term : m.terms) text += fmt::format("\n  {} {}", term.text, term.nbytes);
  }
}

// Keeps what a budget makes of the configuration, too. Throws what else a training would refuse
// before its first step.
TrainPlan plan_of(Configuration& c) {
  const TransformerConfig& config = c.config;
  const std::unique_ptr<LanguageModel> owned = c.model.make();
  LanguageModel& model = *owned;
  const Ranks ranks = c.ranks();
  const PlanTarget target = plan_target(ranks, config);
  if (config.memory_limit_nbytes() > 0) c.fitted = fit_transformer(config, model, target).config;
  TrainPlan plan = plan_transformer(config, c.fitted, model, target);
  static_cast<void>(check_shortage(transformer_shortage(config, c.fitted, model, ranks), c.fitted));
  return plan;
}

}  // namespace

std::string text_of_steps(const TrainPlan& plan) {
  std::string text = fmt::format("{} launches, {} between steps, peak at {}", plan.num_launches,
                                 plan.between_steps_nbytes, plan.peak_at);
  for (const StepRecord& step : plan.steps) {
    text +=
        fmt::format("\nstep {} ms, {} exposed, {} sent in {}", step.step_ms, step.exposed_comm_ms,
                    step.traffic.bytes_sent, step.traffic.num_collectives);
    add_memory(text, step.step_memory);
    add_memory(text, step.step_host_memory);
  }
  for (const PlannedCollective& c : plan.collectives) {
    text += fmt::format("\n{} {} {} {} {} {}", c.name, c.label, c.bytes_sent,
                        fmt::join(plan.groups[c.group], ","), c.end_ms, c.exposed_ms);
  }
  add_terms(text, plan.memory);
  add_terms(text, plan.host_memory);
  return text;
}

void check_plans(Request& request) {
  std::vector<std::string> plans;
  for (std::size_t i = 0; i < request.configurations.size(); ++i) {
    Configuration& c = request.configurations[i];
    plans.push_back(named(c.name, [&] { return text_of_steps(plan_of(c)); }));
    for (std::size_t k = 0; k < i && !c.same_plan_as; ++k) {
      const Configuration& other = request.configurations[k];
      const bool is_same = plans[k] == plans[i] && differ_in_schedule_alone(other, c);
      if (is_same && !other.same_plan_as) c.same_plan_as = k;
    }
  }
}

std::vector<PlanRow> plan_rows(const Request& request) {
  std::vector<PlanRow> rows;
  for (const Configuration& c : request.configurations) {
    rows.push_back(named(c.name, [&] {
      const std::unique_ptr<LanguageModel> model = c.model.make();
      return plan_row(c.name, c.config, *model, plan_target(c.ranks(), c.config));
    }));
  }
  return rows;
}

}  // namespace tessera::tools
