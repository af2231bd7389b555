// Which source each sample of a mix is of: a function of its number alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::tools {

/// Samples come in blocks of kBlock, in each of which every source has its quota exactly. In a
/// block sources take turns as one shuffled pattern says, which each block begins elsewhere; the
/// samples of a source come in their order.
class MixOrder {
 public:
  static constexpr std::int64_t kBlock = 4096;

  /// `weights`: of the sources, of any sum; quotas are rounded by the largest remainder. Throws
  /// InvalidArgument for none, one that is not above 0 and finite, or too small for a sample of a
  /// block.
  MixOrder(std::span<const double> weights, std::uint64_t seed);

  struct Place {
    std::size_t source;
    std::int64_t sample;  ///< how many samples before are of this source
  };
  /// Of sample n >= 0.
  Place place(std::int64_t n) const;
  /// Samples of a block, by source.
  const std::vector<std::int64_t>& quotas() const { return quotas_; }

 private:
  std::uint64_t seed_;
  std::vector<std::int64_t> quotas_;
  std::vector<std::int32_t> pattern_;             // the source of each of kBlock turns
  std::vector<std::vector<std::int64_t>> turns_;  // of each source, rising
};

}  // namespace tessera::tools
