// Flat layout of a group of parameters: where each starts, where the shards are cut. Integers only.
//
//   flat:  | p0 ....... pad | p1 .... pad | p2 .. pad | end padding |
//   cut:   | shard 0          | shard 1         | shard 2           |   all of equal length
//
// Every parameter and every shard starts at a multiple of kAlignmentNumel elements (256 bytes in
// bf16). Padding is moved but never read as a value: everything that computes on a shard walks its
// segments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::shard {

inline constexpr std::int64_t kAlignmentNumel = 128;

/// A run of elements of one parameter inside one shard.
struct Segment {
  std::size_t parameter;         ///< index into the layout's parameters
  std::int64_t parameter_begin;  ///< first element, counted in the parameter
  std::int64_t shard_begin;      ///< first element, counted in the shard
  std::int64_t numel;

  friend bool operator==(const Segment&, const Segment&) = default;
};

/// Neighbouring elements of a flat buffer.
struct Range {
  std::int64_t begin;
  std::int64_t numel;

  friend bool operator==(const Range&, const Range&) = default;
};

class Layout {
 public:
  /// Parameters of `numels` elements, in order, cut into `num_shards` equal shards.
  /// Throws InvalidArgument for a negative size, num_shards < 1 or 2^63 overflow.
  Layout(std::span<const std::int64_t> numels, int num_shards);

  int num_shards() const { return num_shards_; }
  std::size_t num_parameters() const { return numels_.size(); }
  /// First element of parameter `i` in the flat buffer.
  std::int64_t offset(std::size_t i) const { return offsets_[i]; }
  std::int64_t numel(std::size_t i) const { return numels_[i]; }
  /// Elements of one shard, padding included; flat_numel() = num_shards() * shard_numel().
  std::int64_t shard_numel() const { return shard_numel_; }
  std::int64_t flat_numel() const { return shard_numel_ * num_shards_; }
  /// Elements that are parameters, not padding.
  std::int64_t value_numel() const { return value_numel_; }
  /// What shard `rank` holds, in order. Segments of all ranks cover every element once.
  std::vector<Segment> segments(int rank) const;
  /// What any part of the flat buffer holds, in order, from which `shard_begin` then counts.
  std::vector<Segment> segments(const Range& range) const;
  /// Part `part` of `num_parts` equal ones, which must divide the shards.
  Range part(int part, int num_parts) const;

 private:
  int num_shards_;
  std::vector<std::int64_t> numels_;
  std::vector<std::int64_t> offsets_;
  std::int64_t shard_numel_ = 0;
  std::int64_t value_numel_ = 0;
};

}  // namespace tessera::shard
