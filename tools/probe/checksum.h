// Checksums of tensors that ranks hold in parts: those of the parts add up to that of the whole.
#pragma once

#include <cstdint>
#include <span>

namespace tessera::tools {

struct Checksum {
  /// Sum mod 2^64 over the elements of a mix of f32 bits and index in the whole tensor: the same
  /// for the same bits, however they are cut.
  std::uint64_t hash = 0;
  std::int64_t numel = 0;
  double max_abs = 0;  ///< NaN if an element is
  double sum = 0;      ///< in double, so its rounding depends on the parts

  Checksum& operator+=(const Checksum& other);
};

/// Of elements [first, first + size) of a tensor. A bf16 element counts as the f32 it widens to.
Checksum checksum_of(std::span<const float> values, std::int64_t first);

}  // namespace tessera::tools
