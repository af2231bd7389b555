// Strategies as a person lists them: "all", or "ddp,zero3,hsdp:2".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

struct StrategyChoice {
  std::string name;              ///< as it was written: "hsdp:2"
  std::string strategy;          ///< "hsdp"
  std::int64_t shard_ranks = 0;  ///< 2; 0: not said
};

/// "zero3", "hsdp:2". Throws InvalidArgument for what is no hybrid, or no number, after a colon.
StrategyChoice parse_strategy(std::string_view text);

/// `text`, but for "all": every strategy under one of its names, with commas between.
std::string strategies_of(std::string_view text);

/// The strategies of `text`. Throws InvalidArgument for an empty list, an empty word, an unknown
/// strategy, and for one that stands twice.
std::vector<StrategyChoice> parse_strategies(std::string_view text);

}  // namespace tessera::tools
