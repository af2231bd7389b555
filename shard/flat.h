// The parameters of one unit that are laid out, gathered and reduced as one flat buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/parameter.h"
#include "engine/tensor.h"
#include "shard/layout.h"
#include "shard/placement.h"
#include "shard/split_tensor.h"
#include "shard/tile.h"

namespace tessera::shard {

struct Flat {
  std::vector<engine::Parameter*> parameters;
  bool trainable;
  Layout layout;

  // What this rank holds between uses. Of frozen parameters there are no gradients, and `owned` is
  // `parameter_range`.
  Range parameter_range;          ///< the copy that is computed with, or gathered from
  Range gradient_range;           ///< the sum of gradients
  Range owned;                    ///< what the optimizer updates
  Place owner = Place::kWhole;    ///< over which ranks the owned parts are cut
  std::vector<Segment> segments;  ///< of `owned`
  /// (tiles, 2) i64 on a GPU, for kernels: the segments as rows of Tile.
  engine::Tensor tiles = {};

  /// (owned.numel) in f32, or of frozen parameters in the dtype that is computed with.
  SplitTensor master = {};
  /// (owned.numel) f32: the sum of gradients over ranks and micro-steps, once finish_step() has
  /// waited for it.
  SplitTensor grad_sum = {};
  /// The unit adds the squares of `grad_sum` for the norm, as sums are offloaded from a GPU.
  bool has_own_squares = false;
  /// With UnusedParameters::kSkip, after finish_step(): 1 for each parameter that no rank's
  /// backward reached. Otherwise empty.
  std::vector<std::uint8_t> unused = {};
};

/// Where a parameter is: the flat that it is part of, and which of its parameters it is.
struct Location {
  const Flat& flat;
  std::size_t index;
};

/// `segments`, each cut into as few tiles as there can be, in order.
std::vector<Tile> tiles_of(std::span<const Segment> segments);
/// tiles_of() for kernels, as rows (tiles, 2) i64.
engine::Tensor make_tile_table(const engine::Memory& memory, std::span<const Segment> segments,
                               const std::string& name);

}  // namespace tessera::shard
