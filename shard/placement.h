// A strategy as a value: where parameters, gradients and optimizer state live between their uses.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::shard {

/// How a state is cut over the grid of ranks `replicate x shard` (mesh.h).
enum class Place {
  kWhole,  ///< all of it on every rank
  kShard,  ///< cut over the shard axis, the same in every replica
  kWorld,  ///< cut over all ranks
};

/// Each state is cut at least as finely as the one before it. The named strategies are presets.
struct Placement {
  Place parameters = Place::kShard;
  Place gradients = Place::kShard;
  Place optimizer = Place::kShard;
  /// Cut parameters only: give the gathered copy back between forward and backward.
  bool reshard_after_forward = true;
  /// With reshard_after_forward: into how many parts, each kept by one of as many neighbouring
  /// ranks of the shard axis, which backward gathers from; 0: all, and nothing more is kept.
  int reshard_ranks = 0;

  friend bool operator==(const Placement&, const Placement&) = default;

  /// Whether no state is cut.
  bool is_whole() const;
  /// Throws InvalidArgument for states cut more coarsely than the one before, and for resharding of
  /// parameters that are not cut.
  void validate() const;

  /// ddp, zero1, zero2, zero3 (= full_shard = fsdp), shard_grad_op, hsdp, hybrid_zero2, hfsdp.
  /// Throws InvalidArgument naming the choices for any other name.
  static Placement preset(std::string_view name);
  static const std::vector<std::string>& preset_names();
};

std::string to_string(const Placement& placement);

/// Whether the strategy is meant for several replicas: hsdp, hybrid_zero2, hfsdp.
bool is_hybrid(std::string_view preset);
/// Ranks of the shard axis that the strategy takes unless told otherwise: all of them, or for
/// hybrids the largest divisor of `world_size` that is at most half of it.
int default_shard_ranks(std::string_view preset, int world_size);

}  // namespace tessera::shard
