#include "tools/planning/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/models/model.h"
#include "tools/planning/plan_report.h"
#include "tools/report/step_text.h"

namespace tessera::tools {

namespace {

nlohmann::ordered_json options_of(TrainConfig config) {
  FlagSet flags("options", "");
  config.add_to(flags);
  return nlohmann::ordered_json::parse(flags.to_json());
}

// The options of `b` that have other values in `a`.
std::vector<std::pair<std::string, std::string>> changes(const TrainConfig& a,
                                                         const TrainConfig& b) {
  const nlohmann::ordered_json before = options_of(a), after = options_of(b);
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& [name, value] : after.items()) {
    if (before.at(name) != value) result.emplace_back(name, value.dump());
  }
  return result;
}

// "parallel.prefetch=0", for each.
std::vector<std::string> texts_of(const std::vector<std::pair<std::string, std::string>>& options) {
  std::vector<std::string> texts;
  for (const auto& [name, literal] : options) {
    std::string value = literal;
    std::erase(value, '"');
    if (value.ends_with(".0")) value.resize(value.size() - 2);
    texts.push_back(fmt::format("{}={}", name, value));
  }
  return texts;
}

BudgetRung rung_of(const TrainConfig& asked, const BudgetSearch::Found& found) {
  const std::vector<std::string> texts = texts_of(changes(asked, found.config));
  return {texts.empty() ? "as asked" : fmt::format("{}", fmt::join(texts, ", ")), found.nbytes,
          found.step_ms, found.fits};
}

// No less than `nbytes`.
std::string mib_up(std::int64_t nbytes) {
  return fmt::format("{:.1f}MiB", std::ceil(static_cast<double>(nbytes) / 0x1p20 * 10) / 10);
}

}  // namespace

BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      std::int64_t num_blocks, const PlanMost& plan_most,
                      const PlanMost& plan_one) {
  constexpr std::ptrdiff_t kMostShown = 5;  // of what fits
  BudgetPlan plan{.config = config, .rungs = {}};
  std::optional<BudgetSearch::Found> least;  // of all micro-batches
  for (std::int64_t batch = config.train.batch; batch > 0; --batch) {
    if (config.train.batch % batch != 0) continue;
    TrainConfig smaller = config;
    smaller.train.batch = batch;
    smaller.train.accum *= config.train.batch / batch;
    BudgetSearch search(smaller, budget_nbytes, num_blocks, plan_most, plan_one);
    const std::vector<BudgetSearch::Found> found = search.run();
    plan.num_plans += search.num_looked();
    if (plan.rungs.empty()) plan.rungs.push_back(rung_of(config, search.asked()));
    if (found.empty()) {
      if (!least || search.least().nbytes < least->nbytes) least = search.least();
      continue;
    }
    plan.config = found.back().config;
    plan.options = changes(config, plan.config);
    if (plan.options.empty()) return plan;
    for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(std::ssize(found) - kMostShown, 0);
         i < std::ssize(found); ++i) {
      plan.rungs.push_back(rung_of(config, found[static_cast<std::size_t>(i)]));
    }
    if (batch < config.train.batch) {
      plan.remark = fmt::format(
          "train.batch={} with train.accum={}: a step has the same samples, whose sums are rounded "
          "otherwise than with train.batch={}",
          batch, smaller.train.accum, config.train.batch);
    }
    return plan;
  }
  const TrainPlan smallest = plan_most(least->config);
  least->nbytes = peak_nbytes(smallest);
  plan.rungs.push_back(rung_of(config, *least));
  engine::fail(
      "[memory_budget] expected a way to train within {} bytes per rank, got none: the smallest "
      "budget that fits is {} bytes ({})\n  {}\n  {}",
      engine::with_commas(budget_nbytes), engine::with_commas(least->nbytes), mib_up(least->nbytes),
      fmt::join(lines_of(plan, budget_nbytes), "\n  "), fmt::join(largest_lines(smallest), "\n  "));
}

TrainPlan most_of_ranks(int num_ranks, const std::function<std::string(int rank)>& kind,
                        const std::function<TrainPlan(int rank)>& plan) {
  std::set<std::string> planned = {kind(0)};
  TrainPlan most = plan(0);
  for (int rank = 1; rank < num_ranks; ++rank) {
    if (!planned.insert(kind(rank)).second) continue;
    TrainPlan other = plan(rank);
    if (peak_nbytes(other) > peak_nbytes(most)) most = std::move(other);
  }
  return most;
}

TrainConfig without_budget(const TrainConfig& config) {
  TrainConfig unlimited = config;
  if (!config.memory_budget.empty()) unlimited.cuda.graph = GraphChoice::kOff;  // as the run
  unlimited.memory_budget.clear();
  return unlimited;
}

std::vector<std::string> lines_of(const BudgetPlan& plan, std::int64_t budget_nbytes) {
  std::vector<std::string> lines = {
      fmt::format("memory budget of {} bytes ({}) per rank:", engine::with_commas(budget_nbytes),
                  nbytes_text(static_cast<double>(budget_nbytes)))};
  for (const BudgetRung& rung : plan.rungs) {
    const bool is_chosen = rung.fits && &rung == &plan.rungs.back();
    lines.push_back(
        fmt::format("  {:>16} B  {:>12}  {:>10}  {:<9} {}", engine::with_commas(rung.nbytes),
                    nbytes_text(static_cast<double>(rung.nbytes)), duration_text(rung.step_ms),
                    is_chosen   ? "chosen"
                    : rung.fits ? "fits"
                                : "too much",
                    rung.what));
  }
  if (!plan.remark.empty()) lines.push_back("  " + plan.remark);
  return lines;
}

JsonRecord budget_record(const BudgetPlan& plan, std::int64_t budget_nbytes) {
  std::vector<std::string> rungs;
  for (const BudgetRung& rung : plan.rungs) {
    rungs.push_back(JsonRecord()
                        .add("what", rung.what)
                        .add("peak_bytes", rung.nbytes)
                        .add("step_ms", rung.step_ms)
                        .add("fits", rung.fits)
                        .text());
  }
  JsonRecord options;
  for (const auto& [name, literal] : plan.options) options.add_literal(name, literal);
  JsonRecord record;
  record.add("bytes", budget_nbytes)
      .add_literal("rungs", fmt::format("[{}]", fmt::join(rungs, ",")))
      .add_literal("options", options.text());
  record.add("num_plans", plan.num_plans);
  if (!plan.remark.empty()) record.add("remark", plan.remark);
  return record;
}

}  // namespace tessera::tools
