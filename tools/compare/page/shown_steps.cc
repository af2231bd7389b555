#include "tools/compare/page/shown_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "shard/placement.h"
#include "tools/compare/page/trace_slices.h"
#include "tools/models/language_model.h"
#include "tools/planning/plan_memory.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/planner.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/transformer_plan.h"
#include "tools/trace/trace_events.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMaxSteps = 64;
// Over all of them, and of one.
constexpr std::size_t kMaxPoints = 4000, kMinPointsOfOne = 24, kMaxPointsOfOne = 240;
constexpr std::size_t kMaxSlices = 8000, kMaxSlicesOfOne = 1500;

std::string trace_path(const std::string& folder) { return folder + "/trace.json"; }

bool has_trace(const std::string& folder) {
  std::error_code ignored;
  return !folder.empty() && std::filesystem::is_regular_file(trace_path(folder), ignored);
}

bool gathers(const Configuration& c) {
  return c.num_ranks > 1 && c.config.parallel.preset().parameters != shard::Place::kWhole;
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
    if (without.fitted.parallel.prefetch != 0 || !gathers(without)) continue;
    for (const std::size_t on : rows) {
      const Configuration& with = *comparison.rows[on].configuration;
      if (with.fitted.parallel.prefetch > 0 && other_options(with) == other_options(without)) {
        return std::pair(on, off);
      }
    }
  }
  return std::nullopt;
}

Configuration with_prefetch(Configuration c, std::int64_t prefetch) {
  ParallelConfig& parallel = c.fitted.parallel;
  if (parallel.prefetch == prefetch) return c;
  parallel.prefetch = prefetch;
  if (prefetch == 0) parallel.backward_prefetch = shard::BackwardPrefetch::kPre;
  c.name += fmt::format(" with prefetch={}", prefetch);
  return c;
}

// Whose streams are drawn first: with gathers ahead, and the same without.
std::vector<Configuration> drawn_first(const Comparison& comparison,
                                       const std::vector<std::size_t>& trained,
                                       const std::vector<std::size_t>& traced) {
  const auto at = [&](std::size_t i) -> const Configuration& {
    return *comparison.rows[i].configuration;
  };
  if (const auto pair = with_and_without(comparison, traced.empty() ? trained : traced)) {
    return {at(pair->first), at(pair->second)};
  }
  if (traced.size() > 1) return {at(traced[0]), at(traced[1])};
  if (traced.size() == 1) return {at(traced[0])};
  for (const std::size_t i : trained) {
    if (!gathers(at(i))) continue;
    return {with_prefetch(at(i), std::max<std::int64_t>(1, at(i).fitted.parallel.prefetch)),
            with_prefetch(at(i), 0)};
  }
  if (trained.empty()) return {};
  return {at(trained.front())};
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

// As its trace has it, if there is one, and as planned if not.
std::optional<ordered_json> step_of(const Configuration& c, const std::string& folder,
                                    const StepDetail& detail, std::vector<std::string>& warnings) {
  std::optional<ordered_json> planned = attempt([&] { return planned_step(c, detail); }, warnings);
  if (!has_trace(folder)) return planned;
  std::optional<ordered_json> traced =
      attempt([&] { return step_of_trace_file(trace_path(folder), c.name, detail); }, warnings);
  if (!traced) return planned;
  (*traced)["source"] = "trace";
  for (const char* terms : {"terms", "host_terms", "sent_terms"}) {
    (*traced)[terms] = planned ? planned->at(terms) : ordered_json::array();
  }
  return traced;
}

}  // namespace

ordered_json planned_step(const Configuration& c, const StepDetail& detail) {
  const std::unique_ptr<LanguageModel> model = c.model.make();
  const PlanTarget target = plan_target(c.ranks(), c.fitted);
  std::string text;
  TraceWriter writer([&text](const std::string& more) { text += more; });
  const TrainPlan plan = plan_transformer(c.config, c.fitted, *model, target, &writer);
  ordered_json step = step_of_trace(engine::parse_json(text, c.name), c.name, c.name, detail);
  step["source"] = "plan";
  step["terms"] = terms_of(plan.memory);
  step["host_terms"] = terms_of(plan.host_memory);
  step["sent_terms"] = ordered_json::array();
  for (const PlanTerm& term : sent_terms(plan)) {
    step["sent_terms"].push_back({{"text", term.text}, {"bytes", term.nbytes}});
  }
  return step;
}

ordered_json steps_to_show(const Comparison& comparison, std::span<const std::string> folders,
                           std::vector<std::string>& warnings) {
  std::vector<std::size_t> trained, traced;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    if (!folders[i].empty()) trained.push_back(i);
    if (has_trace(folders[i])) traced.push_back(i);
  }
  const std::vector<Configuration> drawn = drawn_first(comparison, trained, traced);
  const auto number_of = [](const auto& steps, const std::string& name) -> std::optional<int> {
    const auto found =
        std::ranges::find_if(steps, [&](const auto& s) { return s["name"] == name; });
    if (found == steps.end()) return std::nullopt;
    return int(found - steps.begin());
  };
  const std::size_t num_steps = std::clamp<std::size_t>(trained.size(), 1, kMaxSteps);
  const StepDetail detail{
      .max_points = std::clamp(kMaxPoints / num_steps, kMinPointsOfOne, kMaxPointsOfOne),
      .max_slices = std::min(kMaxSlices / num_steps, kMaxSlicesOfOne)};
  ordered_json steps = ordered_json::array();
  const auto add = [&](const Configuration& c, const std::string& folder) {
    if (auto step = step_of(c, folder, detail, warnings)) steps.push_back(std::move(*step));
  };
  const auto is_drawn = [&](const std::string& name) {
    return std::ranges::any_of(drawn, [&](const Configuration& c) { return c.name == name; });
  };
  std::set<std::string> names;
  for (std::size_t n = 0; n < trained.size(); ++n) {
    const Configuration& c = *comparison.rows[trained[n]].configuration;
    names.insert(c.name);
    if (n < kMaxSteps || is_drawn(c.name)) add(c, folders[trained[n]]);
  }
  ordered_json streams = ordered_json::array();
  for (const Configuration& c : drawn) {
    if (!names.contains(c.name)) add(c, "");
    if (const auto number = number_of(steps, c.name)) streams.push_back(*number);
  }
  return {{"steps", std::move(steps)}, {"streams", std::move(streams)}};
}

}  // namespace tessera::tools
