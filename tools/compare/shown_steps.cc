#include "tools/compare/shown_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "shard/placement.h"
#include "tools/compare/trace_slices.h"
#include "tools/models/gpt.h"
#include "tools/trace/trace_events.h"
#include "tools/train/budget.h"
#include "tools/train/plan_memory.h"
#include "tools/train/planner.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMaxWithMemory = 64;
constexpr std::size_t kMaxPoints = 4000;  // of memory, over all configurations
constexpr std::size_t kMaxPointsOfOne = 240, kMinPointsOfOne = 24;

TrainPlan plan_of(const Configuration& c, TrainConfig config, Gpt& model, TraceWriter* trace) {
  const engine::Shape shape{config.train.batch,
                            c.config.model.seq == 0 ? c.model.seq : c.config.model.seq};
  config.memory_budget.clear();  // which a plan may exceed
  return make_plan(
      config,
      {.num_ranks = c.num_ranks,
       .on_gpus = c.on_gpu,
       .sums_in_rank_order = c.sums_in_rank_order,
       .rates = config.rates.rates()},
      model, {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}},
      trace);
}

std::string trace_path(const std::string& folder) { return folder + "/trace.json"; }

bool has_trace(const std::string& folder) {
  std::error_code ignored;
  return !folder.empty() && std::filesystem::is_regular_file(trace_path(folder), ignored);
}

bool gathers(const Configuration& c) {
  return c.num_ranks > 1 &&
         shard::Placement::preset(c.config.parallel.strategy).parameters != shard::Place::kWhole;
}

// Its options without how far gathers run ahead.
std::map<std::string, std::string> other_options(const Configuration& c) {
  std::map<std::string, std::string> options = c.options;
  options.erase("parallel.prefetch");
  return options;
}

// Two of `rows` that differ in parallel.prefetch alone: with gathers ahead, and without.
std::optional<std::pair<std::size_t, std::size_t>> with_and_without(
    const Comparison& comparison, const std::vector<std::size_t>& rows) {
  for (const std::size_t off : rows) {
    const Configuration& without = *comparison.rows[off].configuration;
    if (without.config.parallel.prefetch != 0 || !gathers(without)) continue;
    for (const std::size_t on : rows) {
      const Configuration& with = *comparison.rows[on].configuration;
      if (with.config.parallel.prefetch > 0 && other_options(with) == other_options(without)) {
        return std::pair(on, off);
      }
    }
  }
  return std::nullopt;
}

Configuration with_prefetch(Configuration c, std::int64_t prefetch) {
  if (c.config.parallel.prefetch == prefetch) return c;
  c.config.parallel.prefetch = prefetch;
  if (prefetch == 0) c.config.parallel.backward_prefetch = shard::BackwardPrefetch::kPre;
  c.name += fmt::format(" with prefetch={}", prefetch);
  return c;
}

// What to plan where no trace was taken: the same pair, or one of whatever gathers first.
std::vector<Configuration> to_plan(const Comparison& comparison,
                                   const std::vector<std::size_t>& rows) {
  const auto at = [&](std::size_t i) -> const Configuration& {
    return *comparison.rows[i].configuration;
  };
  if (const auto pair = with_and_without(comparison, rows)) {
    return {at(pair->first), at(pair->second)};
  }
  for (const std::size_t i : rows) {
    if (!gathers(at(i))) continue;
    return {with_prefetch(at(i), std::max<std::int64_t>(1, at(i).config.parallel.prefetch)),
            with_prefetch(at(i), 0)};
  }
  if (rows.empty()) return {};
  return {at(rows.front())};
}

// What `make` returns, unless it cannot be made.
template <class Make>
std::optional<ordered_json> attempt(Make make, std::vector<std::string>& warnings) {
  try {
    return make();
  } catch (const engine::Error& e) {
    warnings.emplace_back(e.what());
    return std::nullopt;
  }
}

ordered_json terms_of(const std::vector<PlannedMemory>& categories) {
  ordered_json terms = ordered_json::array();
  for (const PlannedMemory& memory : categories) {
    for (const PlanTerm& term : memory.terms) {
      terms.push_back(
          {{"category", name_of(memory.category)}, {"text", term.text}, {"bytes", term.nbytes}});
    }
  }
  return terms;
}

ordered_json traced_step(const std::string& folder, const std::string& name,
                         std::size_t max_points) {
  ordered_json step = step_of_trace_file(trace_path(folder), name, max_points);
  step["source"] = "trace";
  return step;
}

}  // namespace

ordered_json planned_step(const Configuration& c, std::size_t max_points) {
  Gpt model(c.model);
  TrainConfig config = static_cast<const TrainConfig&>(c.config);
  if (const std::int64_t budget = config.memory_limit_nbytes(); budget > 0) {
    config = fit_budget(config, budget, c.model.layers, [&](const TrainConfig& tried) {
               return plan_of(c, tried, model, nullptr);
             }).config;
  }
  std::string text;
  TraceWriter writer([&text](const std::string& more) { text += more; });
  const TrainPlan plan = plan_of(c, config, model, &writer);
  ordered_json step = step_of_trace(engine::parse_json(text, c.name), c.name, c.name, max_points);
  step["source"] = "plan";
  step["terms"] = terms_of(plan.memory);
  step["host_terms"] = terms_of(plan.host_memory);
  return step;
}

ordered_json steps_to_show(const Comparison& comparison, std::span<const std::string> folders,
                           std::vector<std::string>& warnings) {
  std::vector<std::size_t> trained, traced;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    if (!folders[i].empty()) trained.push_back(i);
    if (has_trace(folders[i])) traced.push_back(i);
  }
  const std::size_t max_points = std::clamp(kMaxPoints / std::max<std::size_t>(trained.size(), 1),
                                            kMinPointsOfOne, kMaxPointsOfOne);
  ordered_json result = {{"streams", ordered_json::array()}, {"memory", ordered_json::array()}};
  const auto name_of_row = [&](std::size_t i) { return comparison.rows[i].configuration->name; };
  const auto add_streams = [&](std::optional<ordered_json> step) {
    if (!step) return;
    step->erase("memory");
    step->erase("terms");
    step->erase("host_terms");
    result["streams"].push_back(std::move(*step));
  };
  if (!traced.empty()) {
    std::vector<std::size_t> shown = traced;
    if (const auto pair = with_and_without(comparison, traced)) shown = {pair->first, pair->second};
    shown.resize(std::min<std::size_t>(shown.size(), 2));
    for (const std::size_t i : shown) {
      add_streams(attempt([&] { return traced_step(folders[i], name_of_row(i), 1); }, warnings));
    }
  }
  if (result["streams"].empty()) {
    for (const Configuration& c : to_plan(comparison, trained)) {
      add_streams(attempt([&] { return planned_step(c, 1); }, warnings));
    }
  }
  trained.resize(std::min(trained.size(), kMaxWithMemory));
  for (const std::size_t i : trained) {
    auto step = attempt([&] { return planned_step(*comparison.rows[i].configuration, max_points); },
                        warnings);
    if (has_trace(folders[i])) {
      auto measured =
          attempt([&] { return traced_step(folders[i], name_of_row(i), max_points); }, warnings);
      if (measured && !measured->at("memory").is_null()) {
        for (const char* terms : {"terms", "host_terms"}) {
          (*measured)[terms] = step ? step->at(terms) : ordered_json::array();
        }
        step = std::move(measured);
      }
    }
    if (!step) continue;
    step->erase("threads");
    step->erase("left_out");
    result["memory"].push_back(std::move(*step));
  }
  return result;
}

}  // namespace tessera::tools
