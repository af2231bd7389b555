// Which of several choices no other beats.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace tessera::tools {

struct Choice {
  double bytes = 0;       ///< less is better
  double throughput = 0;  ///< more is better
};

/// For each choice, whether no other is at least as good in both and better in one. What is not
/// known is on no front and beats nothing.
std::vector<bool> pareto_front(std::span<const std::optional<Choice>> choices);

}  // namespace tessera::tools
