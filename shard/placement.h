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
  /// Ranks that one copy of what is cut over the shard axis lies on, a divisor of all ranks, or one
  /// of the two words below. Other ranks have copies of their own.
  int shard_ranks = kAllRanks;

  static constexpr int kAllRanks = 0;
  /// The largest divisor of the ranks that is at most half of them.
  static constexpr int kHalfOfRanks = -1;

  friend bool operator==(const Placement&, const Placement&) = default;

  /// Whether no state is cut.
  bool is_whole() const;
  /// Whether there may be several copies of what is cut over the shard axis: of a preset, or of
  /// what was asked for. Fsdp::options() has the number of ranks in its place.
  bool is_hybrid() const { return !is_whole() && shard_ranks != kAllRanks; }
  /// What `shard_ranks` is among `num_ranks`: 1 if no state is cut. Does not look whether it
  /// divides them.
  int shard_ranks_of(int num_ranks) const;
  /// Throws InvalidArgument for states cut more coarsely than the one before, for resharding of
  /// parameters that are not cut, and for `shard_ranks` below -1, or above 1 where nothing is cut.
  void validate() const;

  /// ddp, zero1, zero2, zero3 (= full_shard = fsdp), shard_grad_op, and with copies on each half of
  /// the ranks hsdp, hybrid_zero2, hfsdp. Throws InvalidArgument naming the choices for any other
  /// name.
  static Placement preset(std::string_view name);
  static const std::vector<std::string>& preset_names();
};

/// Where states are cut; `shard_ranks` is left out.
std::string to_string(const Placement& placement);

}  // namespace tessera::shard
