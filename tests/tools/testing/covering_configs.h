// Training configurations that show every pair of choices.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/covering.h"
#include "tools/config/train_config.h"

namespace tessera::testing {

/// One of the choices of a factor, as an option would say it.
struct ConfigLevel {
  std::string text;
  std::function<void(tools::TrainConfig&)> set;
};
using ConfigFactor = std::vector<ConfigLevel>;

/// `field` returns what a configuration says of the option `name`; `levels`: texts and values.
template <class Value, class Field>
ConfigFactor config_factor(const char* name, Field field,
                           const std::vector<std::pair<const char*, Value>>& levels) {
  ConfigFactor factor;
  for (const auto& level : levels) {
    factor.push_back({fmt::format("{}={}", name, level.first),
                      [field, value = level.second](tools::TrainConfig& c) { field(c) = value; }});
  }
  return factor;
}

/// What any plan depends on: strategy, ranks, gathers ahead, resharding, recomputing, accumulation.
inline std::vector<ConfigFactor> parallel_factors() {
  using Config = tools::TrainConfig&;
  return {
      config_factor<std::string>("strategy", [](Config c) -> auto& { return c.parallel.strategy; },
                                 {{"ddp", "ddp"},
                                  {"zero1", "zero1"},
                                  {"zero2", "zero2"},
                                  {"zero3", "zero3"},
                                  {"shard_grad_op", "shard_grad_op"},
                                  {"hsdp", "hsdp"},
                                  {"hybrid_zero2", "hybrid_zero2"},
                                  {"hfsdp", "hfsdp"}}),
      config_factor<std::int64_t>("ranks", [](Config c) -> auto& { return c.parallel.ranks; },
                                  {{"1", 1}, {"2", 2}, {"3", 3}, {"4", 4}}),
      config_factor<std::int64_t>("prefetch", [](Config c) -> auto& { return c.parallel.prefetch; },
                                  {{"0", 0}, {"1", 1}, {"2", 2}, {"9", 9}}),
      config_factor<std::string>(
          "reshard", [](Config c) -> auto& { return c.parallel.reshard_after_forward; },
          {{"auto", "auto"}, {"true", "true"}, {"false", "false"}, {"2", "2"}}),
      config_factor<tools::Recompute>("recompute",
                                      [](Config c) -> auto& { return c.train.recompute; },
                                      {{"false", false},
                                       {"true", true},
                                       {"1", tools::Recompute::first(1)},
                                       {"2", tools::Recompute::first(2)}}),
      config_factor<std::int64_t>("accum", [](Config c) -> auto& { return c.train.accum; },
                                  {{"1", 1}, {"2", 2}, {"3", 3}})};
}

struct CoveringConfigs {
  struct Row {
    tools::TrainConfig config;
    std::string text;  ///< its levels
  };
  std::vector<Row> rows;
  std::set<std::string> impossible;  ///< "one level with another": the configuration refuses it
};

/// Of what the configuration itself takes: see covering_rows(). `base` has what no factor sets.
inline CoveringConfigs covering_configs(const tools::TrainConfig& base,
                                        const std::vector<ConfigFactor>& factors) {
  const auto level = [&](std::size_t factor, int i) -> const ConfigLevel& {
    return factors[factor][static_cast<std::size_t>(i)];
  };
  const auto config_of = [&](const CoveringRow& row) {
    tools::TrainConfig config = base;
    for (std::size_t i = 0; i < row.size(); ++i) level(i, row[i]).set(config);
    // The norm of an early update comes too late to clip.
    if (config.train.overlap_optimizer != tools::OverlapOptimizer::kNone) {
      config.train.grad_clip = 0;
    }
    return config;
  };
  const tools::FlagSet no_flags("test", "");
  const auto is_allowed = [&](const CoveringRow& row) {
    const tools::TrainConfig config = config_of(row);
    try {
      config.validate(no_flags);
      static_cast<void>(config.fsdp_options(static_cast<int>(config.parallel.ranks)));
    } catch (const engine::InvalidArgument&) {
      return false;
    }
    return true;
  };
  std::vector<int> num_levels;
  for (const ConfigFactor& factor : factors) num_levels.push_back(static_cast<int>(factor.size()));
  const CoveringRows found = covering_rows(num_levels, is_allowed);
  CoveringConfigs result;
  for (const CoveringRow& row : found.rows) {
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < row.size(); ++i) texts.push_back(level(i, row[i]).text);
    result.rows.push_back({config_of(row), fmt::format("{}", fmt::join(texts, " "))});
  }
  for (const auto& [a, i, b, j] : found.impossible) {
    result.impossible.insert(fmt::format("{} with {}", level(a, i).text, level(b, j).text));
  }
  return result;
}

}  // namespace tessera::testing
