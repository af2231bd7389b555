#include "tools/compare/pareto.h"

#include <algorithm>

namespace tessera::tools {

std::vector<bool> pareto_front(std::span<const std::optional<Choice>> choices) {
  std::vector<bool> front;
  for (const std::optional<Choice>& choice : choices) {
    const auto beats = [&](const std::optional<Choice>& other) {
      if (!other) return false;
      const bool is_as_good =
          other->bytes <= choice->bytes && other->throughput >= choice->throughput;
      return is_as_good && (other->bytes < choice->bytes || other->throughput > choice->throughput);
    };
    front.push_back(choice.has_value() && std::ranges::none_of(choices, beats));
  }
  return front;
}

}  // namespace tessera::tools
