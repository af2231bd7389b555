#include "tools/data/mix_order.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>

#include "engine/error.h"
#include "engine/philox.h"
#include "tools/data/permutation.h"

namespace tessera::tools {
namespace {

using engine::require;

// Hare's: whole parts first, then one each to the largest remainders, to the first of equal ones.
std::vector<std::int64_t> quotas_of(std::span<const double> weights, std::int64_t num) {
  require(!weights.empty(), "[mix] expected sources, got none");
  for (const double weight : weights) {
    require(std::isfinite(weight) && weight > 0, "[mix] expected weights above 0, got {}", weight);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  require(std::isfinite(sum), "[mix] expected weights of a finite sum, got {}", sum);
  std::vector<std::int64_t> quotas;
  std::vector<double> remainders;
  for (const double weight : weights) {
    const double share = weight / sum * static_cast<double>(num);
    quotas.push_back(static_cast<std::int64_t>(share));
    remainders.push_back(share - std::floor(share));
  }
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](auto a, auto b) { return remainders[a] > remainders[b]; });
  const std::int64_t rest = num - std::accumulate(quotas.begin(), quotas.end(), std::int64_t{0});
  for (std::int64_t i = 0; i < rest; ++i) ++quotas[order[static_cast<std::size_t>(i)]];
  for (std::size_t i = 0; i < quotas.size(); ++i) {
    require(quotas[i] > 0, "[mix] expected weights of at least one sample in {}, got {} of {}", num,
            weights[i], sum);
  }
  return quotas;
}

}  // namespace

MixOrder::MixOrder(std::span<const double> weights, std::uint64_t seed)
    : seed_(seed), quotas_(quotas_of(weights, kBlock)), pattern_(kBlock), turns_(weights.size()) {
  std::int64_t next = 0;
  constexpr std::uint64_t kNoEpoch = ~std::uint64_t{0};  // of which no data are ordered
  for (std::size_t source = 0; source < quotas_.size(); ++source) {
    for (std::int64_t i = 0; i < quotas_[source]; ++i, ++next) {
      pattern_[static_cast<std::size_t>(permuted(next, kBlock, seed, kNoEpoch))] =
          static_cast<std::int32_t>(source);
    }
  }
  for (std::size_t turn = 0; turn < pattern_.size(); ++turn)
    turns_[static_cast<std::size_t>(pattern_[turn])].push_back(static_cast<std::int64_t>(turn));
}

MixOrder::Place MixOrder::place(std::int64_t n) const {
  const std::int64_t block = n / kBlock;
  const auto begin = static_cast<std::int64_t>(
      engine::philox(seed_, static_cast<std::uint64_t>(block), ~std::uint64_t{0})[0] % kBlock);
  const std::int64_t turn = (begin + n % kBlock) % kBlock;
  const auto source = static_cast<std::size_t>(pattern_[static_cast<std::size_t>(turn)]);
  const std::vector<std::int64_t>& turns = turns_[source];
  const auto before = [&](std::int64_t end) {
    return std::ranges::lower_bound(turns, end) - turns.begin();
  };
  // From `begin` up to the turn, or to the end and on from 0.
  const std::int64_t in_block = before(turn) - before(begin) + (turn < begin ? quotas_[source] : 0);
  return {source, block * quotas_[source] + in_block};
}

}  // namespace tessera::tools
