// One rank's files of a checkpoint.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "shard/checkpoint/manifest.h"
#include "shard/checkpoint/pieces.h"

namespace tessera::shard {

/// Which files: of what run, step and rank.
struct CheckpointOrigin {
  std::string run;
  std::int64_t step = 0;
  int rank = 0, num_ranks = 1;
};

/// Writes `pieces`, which lie in memory of the host, into `folder`, which is made if need be:
/// parameters and buffers to model-RANK-of-RANKS.safetensors, what only training needs to
/// state-RANK-of-RANKS.safetensors, each if there is any. Checksums are those of the memory, taken
/// before it is written; files are on the disk when this returns. Returns what to say of them:
/// files and tensors. Throws IoError naming the file.
///
/// A piece that is a whole tensor has its name and shape in the file; of others the name ends in
/// "[BEGIN:END]", the elements that they are, and they have one dimension. Names of what is no
/// parameter begin with their kind and a slash.
Manifest write_pieces(const std::string& folder, const CheckpointOrigin& origin,
                      std::span<const CheckpointPiece> pieces);

}  // namespace tessera::shard
