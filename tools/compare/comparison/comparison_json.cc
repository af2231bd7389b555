#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/io/text.h"
#include "tools/compare/comparison/comparison.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

// JSON knows no NaN and no infinity.
ordered_json finite(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

ordered_json json_of(const BytesByCategory& bytes) {
  if (bytes.empty()) return nullptr;
  ordered_json result;
  for (const auto& [name, nbytes] : bytes) result[name] = nbytes;
  return result;
}

// The most of each category, over all rounds.
BytesByCategory most_of(const std::vector<RunRecord>& rounds, BytesByCategory RunRecord::*bytes) {
  BytesByCategory result;
  for (const RunRecord& run : rounds) {
    for (const auto& [name, nbytes] : run.*bytes) result[name] = std::max(result[name], nbytes);
  }
  return result;
}

ordered_json json_of(const std::string& preset, const ModelConfig& model) {
  return {{"preset", preset},
          {"parameters", model.num_parameters()},
          {"layers", model.layers},
          {"dim", model.dim}};
}

ordered_json json_of(const Parity& parity) {
  return {{"kind", name_of(parity.kind)},
          {"text", parity.text},
          {"reference", parity.reference.empty() ? ordered_json() : ordered_json(parity.reference)},
          {"changes_arithmetic", parity.reasons},
          {"max_loss_difference", finite(parity.max_difference)},
          {"first_step", or_null(parity.first_step)},
          {"equal_parameters", parity.equal_parameters}};
}

ordered_json json_of(const std::vector<double>& values) {
  ordered_json result = ordered_json::array();
  for (const double value : values) result.push_back(finite(value));
  return result;
}

ordered_json json_of(const StepParts& parts) {
  return {{"compute_ms", or_null(parts.compute_ms)},
          {"exposed_comm_ms", or_null(parts.exposed_comm_ms)},
          {"optimizer_ms", or_null(parts.optimizer_ms)},
          {"data_ms", or_null(parts.data_ms)},
          {"other_ms", parts.other_ms}};
}

// Of a comparison with a fastest one.
ordered_json fastest_of(const Comparison& comparison) {
  const Speeds& speeds = comparison.speeds;
  if (!speeds.fastest) return nullptr;
  ordered_json others = ordered_json::array();
  for (const std::size_t i : speeds.as_fast)
    others.push_back(comparison.rows[i].configuration->name);
  return {{"name", comparison.rows[*speeds.fastest].configuration->name},
          {"not_told_apart_from", others}};
}

// How much slower a configuration is than the fastest, with its interval; null of that one.
ordered_json speed_of(const Row& row, const std::optional<RatioInterval>& fastest_ratio) {
  ordered_json slower = nullptr;
  if (fastest_ratio) {
    const auto percent = [](double ratio) { return finite(100 * (ratio - 1)); };
    slower = {{"median", percent(fastest_ratio->middle)},
              {"low", percent(fastest_ratio->low)},
              {"high", percent(fastest_ratio->high)},
              {"told_apart", fastest_ratio->low > 1}};
  }
  return {{"tokens_per_s_of_rounds", json_of(row.speeds)}, {"slower_percent", std::move(slower)}};
}

ordered_json json_of(const Comparison& comparison, std::size_t i) {
  const ArithmeticClass& c = comparison.classes[i];
  const Row* reference = comparison.reference_of(c);
  ordered_json names = ordered_json::array();
  for (const std::size_t member : c.members) {
    names.push_back(comparison.rows[member].configuration->name);
  }
  ordered_json result = {{"label", c.label}, {"configurations", names}};
  result["reference"] =
      reference == nullptr ? ordered_json() : ordered_json(reference->configuration->name);
  result["is_another_training"] = i > 0 && c.measured_against == i;
  result["measured_against"] =
      c.measured_against == i ? ordered_json() : ordered_json(c.measured_against);
  result["changes"] = c.changes;
  return result;
}

ordered_json planned_of(const Row& row) {
  if (row.trained.rounds.empty()) return nullptr;
  const RunRecord& run = row.trained.rounds.front();
  if (run.planned_peak_bytes.empty() && !run.planned_sent_bytes) return nullptr;
  return {{"peak_bytes", json_of(run.planned_peak_bytes)},
          {"sent_bytes", or_null(run.planned_sent_bytes)},
          {"num_collectives", or_null(run.planned_num_collectives)}};
}

ordered_json differences(const Row& row, const std::vector<double>* baseline) {
  if (baseline == nullptr || row.trained.rounds.empty()) return nullptr;
  const std::vector<double>& loss = row.trained.rounds.front().loss;
  std::vector<double> result;
  for (std::size_t i = 0; i < std::min(loss.size(), baseline->size()); ++i) {
    result.push_back(loss_difference((*baseline)[i], loss[i]));
  }
  return json_of(result);
}

ordered_json json_of(const Row& row, const std::vector<double>* baseline,
                     const std::optional<RatioInterval>& fastest_ratio) {
  const Configuration& c = *row.configuration;
  const std::vector<RunRecord>& rounds = row.trained.rounds;
  ordered_json result = {{"name", c.name}, {"folder", "runs/" + folder_name_of(c.name)}};
  result["state"] = !row.trained.failure.empty()  ? "failed"
                    : row.same_plan_as != nullptr ? "same plan"
                    : row.complete                ? "done"
                                                  : "missing";
  result["same_plan_as"] =
      row.same_plan_as == nullptr ? ordered_json() : ordered_json(row.same_plan_as->name);
  result["class"] = row.class_index;
  result["failure"] = row.trained.failure;
  result["rounds"] = rounds.size();
  result["strategy"] = c.config.parallel.strategy;
  result["ranks"] = c.num_ranks;
  result["launch"] = c.launch_text.empty() ? ordered_json(nullptr) : ordered_json(c.launch_text);
  result["shard_ranks"] = c.shard_ranks;
  result["steps"] = c.config.train.steps;
  result["model"] = json_of(c.config.model.preset, c.model);
  result["overrides"] = ordered_json::object();
  for (const auto& [key, value] : c.overrides) result["overrides"][key] = value;
  result["parity"] = json_of(row.parity);
  result["params_sha256"] = ordered_json::array();
  for (const RunRecord& run : rounds) result["params_sha256"].push_back(run.params_sha256);
  result["last_loss"] = row.last_loss ? finite(*row.last_loss) : ordered_json(nullptr);
  for (const std::string& name : metric_names()) {
    const auto found = row.metrics.find(name);
    result["metrics"][name] = found == row.metrics.end()
                                  ? ordered_json(nullptr)
                                  : ordered_json{{"median", found->second.median},
                                                 {"q1", found->second.q1},
                                                 {"q3", found->second.q3}};
  }
  result["speed"] = speed_of(row, fastest_ratio);
  result["step_parts_ms"] = row.step_parts ? json_of(*row.step_parts) : ordered_json(nullptr);
  result["peak_bytes"] = json_of(most_of(rounds, &RunRecord::peak_bytes));
  result["host_peak_bytes"] = json_of(most_of(rounds, &RunRecord::host_peak_bytes));
  result["planned"] = planned_of(row);
  result["on_pareto_front"] = or_null(row.is_on_front);
  result["loss"] = rounds.empty() ? ordered_json(nullptr) : json_of(rounds.front().loss);
  result["loss_difference"] = differences(row, baseline);
  for (const auto& [key, value] : c.options) {
    result["options"][key] = ordered_json::parse(value);
  }
  return result;
}

}  // namespace

ordered_json to_json(const Comparison& comparison) {
  const Request& request = *comparison.request;
  const Configuration& baseline = request.configurations.front();
  ordered_json result = {{"format", 3}};
  result["verdict"] = {{"passed", comparison.verdict.passed()},
                       {"complete", comparison.verdict.complete},
                       {"lines", comparison.verdict.lines}};
  result["baseline"] = baseline.name;
  result["rounds"] = request.compare.rounds;
  result["rounds_needed"] = comparison.speeds.rounds_needed == 0
                                ? ordered_json()
                                : ordered_json(comparison.speeds.rounds_needed);
  result["warmup_steps"] = request.compare.warmup_steps;
  result["tolerance"] = request.compare.tolerance;
  result["steps"] = baseline.config.train.steps;
  result["model"] = json_of(baseline.config.model.preset, baseline.model);
  result["fastest"] = fastest_of(comparison);
  result["classes"] = ordered_json::array();
  for (std::size_t i = 0; i < comparison.classes.size(); ++i) {
    result["classes"].push_back(json_of(comparison, i));
  }
  std::set<std::string> machines;
  for (const Row& row : comparison.rows) {
    for (const RunRecord& run : row.trained.rounds) {
      std::string machine = run.cpu.empty() ? run.device : run.device + ", " + run.cpu;
      if (!run.launch.empty()) machine += "; " + run.launch;
      machines.insert(std::move(machine));
    }
  }
  result["devices"] = machines;
  const std::vector<RunRecord>& first = comparison.rows.front().trained.rounds;
  const std::vector<double>* losses = first.empty() ? nullptr : &first.front().loss;
  result["configurations"] = ordered_json::array();
  for (std::size_t i = 0; i < comparison.rows.size(); ++i) {
    result["configurations"].push_back(
        json_of(comparison.rows[i], losses, comparison.speeds.fastest_ratio[i]));
  }
  return result;
}

}  // namespace tessera::tools
