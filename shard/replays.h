// Which units the backward of recomputed regions is to visit again. What updates during backward
// must wait for: until then nothing may change the parameters of such a unit, trainable or not.
//
// Told of what hooks are told, it counts the visits of a first run, and takes one off where the
// region runs again. A visit without gradient (Tape::no_grad) may be inside a region that is
// recomputed or not, which hooks cannot see: it counts until the backward of the region around it
// has ended. Outside of all recorded regions that are wrapped it is taken for an evaluation.
#pragma once

#include <unordered_map>
#include <vector>

#include "engine/tape.h"

namespace tessera::shard {

class Unit;

class Replays {
 public:
  /// Whether the visit was to come.
  bool before_forward(const engine::Block& block, const Unit& unit, engine::Pass pass);
  void after_forward(const engine::Block& block, engine::Pass pass);
  void before_backward(const engine::Block& block);
  void after_backward();
  /// Whether `unit` may be visited again.
  bool has(const Unit& unit) const;
  /// A micro-step begins or ends.
  void clear();

 private:
  using Visits = std::vector<const Unit*>;  // to come; a unit may be there several times
  struct Region {
    const engine::Block* block;
    Visits again = {};
  };

  Visits& around();

  std::vector<Region> forward_;  // recorded regions that are open, the innermost last
  std::unordered_map<const engine::Block*, std::vector<Visits>> ended_;  // with a backward to come
  std::vector<Visits> backward_;  // of regions in backward, the innermost last
  Visits outside_;                // of regions that are not wrapped, in none of these
  std::unordered_map<const Unit*, int> num_visits_;
};

}  // namespace tessera::shard
