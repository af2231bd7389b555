// The ranks as a grid of `num_replicas x shard_ranks`, numbered replica by replica:
//
//              shard 0  shard 1  shard 2
//   replica 0     0        1        2        rank = replica * shard_ranks + shard index
//   replica 1     3        4        5
//
// A row holds one copy of everything that is cut over the shard axis; a column holds the same
// shard. ddp is a grid of one column, zero3 one of one row; an axis of size 1 is the identity.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "shard/layout.h"
#include "shard/placement.h"

namespace tessera::shard {

/// The groups of ranks that one stream communicates over. Null where one rank is alone: there is
/// nothing to do.
struct Axes {
  comm::ProcessGroup* world = nullptr;
  comm::ProcessGroup* shard = nullptr;      ///< this rank's row
  comm::ProcessGroup* replicate = nullptr;  ///< this rank's column
};

class Mesh {
 public:
  /// Collective. Gathers and reductions have groups of their own, as they run at the same time;
  /// without gathers (`gathers`) reductions take `world` itself. `shard_ranks` must divide the size
  /// of `world`, which outlives this, and `reshard_ranks`, if not 0, must divide `shard_ranks`;
  /// throws InvalidArgument otherwise.
  Mesh(comm::ProcessGroup& world, int shard_ranks, int reshard_ranks = 0, bool gathers = true);

  comm::ProcessGroup& world() const { return world_; }
  int shard_ranks() const { return shard_ranks_; }
  int num_replicas() const { return world_.size() / shard_ranks_; }
  int shard_index() const { return world_.rank() % shard_ranks_; }
  int replica() const { return world_.rank() / shard_ranks_; }

  /// For the gather stream.
  const Axes& gather() const { return gather_; }
  /// Neighbours on the shard axis that keep a copy after forward together; see
  /// Placement::reshard_ranks.
  comm::ProcessGroup* reshard() const { return reshard_; }
  /// For the reduce stream.
  const Axes& reduce() const { return reduce_; }

  /// The ranks that a state placed so is cut over; null: this rank alone. Of the gather stream.
  comm::ProcessGroup* group_of(Place place) const;
  /// Over which groups gathers of parts, one after the other, make whole what is placed so. Of the
  /// gather stream.
  std::vector<comm::ProcessGroup*> gathers_of(Place place) const;
  /// How many parts such a state has.
  int num_parts(Place place) const;
  /// Which of them this rank holds. Parts of kWorld lie in those of kShard: the parts of a shard
  /// go to its column, replica by replica.
  int part(Place place) const;
  /// The rank of group_of(place) that holds part `part`; of kShard in this rank's own replica.
  int owner(Place place, int part) const;

  /// Compares on all groups what the ranks have called so far; see ProcessGroup::agree().
  void agree(const engine::Stream& stream) const;

 private:
  comm::ProcessGroup* keep(std::unique_ptr<comm::ProcessGroup> group);

  comm::ProcessGroup& world_;
  int shard_ranks_;
  std::vector<std::unique_ptr<comm::ProcessGroup>> groups_;
  Axes gather_, reduce_;
  comm::ProcessGroup* reshard_ = nullptr;
};

/// Collective: all_gathers over `groups`, one after the other, in place. Each rank begins with
/// `part` of `all`; parts of a group's ranks lie side by side in the order of ranks.
void gather_parts(const std::vector<comm::ProcessGroup*>& groups, const engine::Tensor& all,
                  Range part, const engine::Stream& stream, const std::string& label);

}  // namespace tessera::shard
