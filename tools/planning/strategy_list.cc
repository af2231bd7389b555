#include "tools/planning/strategy_list.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/placement.h"

namespace tessera::tools {

using engine::require;

StrategyChoice parse_strategy(std::string_view text) {
  const std::size_t colon = text.find(':');
  StrategyChoice choice{.name = std::string(text), .strategy = std::string(text.substr(0, colon))};
  if (colon == std::string_view::npos) return choice;
  const std::string_view ranks = text.substr(colon + 1);
  const auto [end, error] =
      std::from_chars(ranks.data(), ranks.data() + ranks.size(), choice.shard_ranks);
  const bool is_count = error == std::errc() && end == ranks.data() + ranks.size() &&
                        choice.shard_ranks > 0 && ranks.front() != '0';
  require(shard::Placement::preset(choice.strategy).is_hybrid() && is_count,
          "[compare] expected the ranks that share one copy after hsdp, hybrid_zero2 or hfsdp, "
          "as hsdp:2 for parallel.shard_ranks=2, got {}",
          engine::excerpt(text));
  return choice;
}

std::string strategies_of(std::string_view text) {
  // Of zero3, fsdp and full_shard, which are one, the first.
  constexpr std::string_view kAll = "ddp,zero1,zero2,zero3,shard_grad_op,hsdp,hybrid_zero2,hfsdp";
  return std::string(text == "all" ? kAll : text);
}

std::vector<StrategyChoice> parse_strategies(std::string_view text) {
  const std::string list = strategies_of(text);
  std::vector<StrategyChoice> choices;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    StrategyChoice choice = parse_strategy(list.substr(begin, end - begin));
    static_cast<void>(shard::Placement::preset(choice.strategy));  // or throws
    require(std::ranges::find(choices, choice.name, &StrategyChoice::name) == choices.end(),
            "[strategies] expected each strategy once, got {} twice", engine::excerpt(choice.name));
    choices.push_back(std::move(choice));
    begin = end + 1;
  }
  return choices;
}

}  // namespace tessera::tools
