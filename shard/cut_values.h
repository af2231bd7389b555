// Values as they are cut over ranks, for who keeps or moves them: checkpoints, summon(), and what
// writes masters by their addresses.
//
//   CutValues values(fsdp);
//   values.check_at_rest("my snapshot");
//   const Location at = fsdp.location_of(p);
//   std::vector<float> whole = values.full(at, at.flat.master);
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/flat.h"
#include "shard/fsdp.h"

namespace tessera::shard {

class CutValues {
 public:
  /// `fsdp` outlives this, which holds nothing else.
  explicit CutValues(Fsdp& fsdp) : fsdp_(fsdp) {}

  /// Collective: what full() returns, as f32 workspace, once the compute stream gets there.
  engine::Tensor whole(const Location& at, const SplitTensor& owned);
  /// Collective: a whole parameter-shaped tensor of which every rank has the elements that its
  /// optimizer owns, laid out like Flat::master; f32 or bf16.
  std::vector<float> full(const Location& at, const SplitTensor& owned);
  /// Not collective: `owned` takes this rank's part of `values`, the whole. If it is Flat::master
  /// this is Fsdp::load() of the parameter.
  void load(const Location& at, const SplitTensor& owned, std::span<const float> values);

  /// For who reads or writes whole values: throws InvalidArgument inside a step, and while a region
  /// is open, naming its unit. `caller` is for the message.
  void check_at_rest(std::string_view caller);
  /// Between steps, for who reads masters and states while the next step runs, as a checkpoint
  /// does: nothing updates or loads them before `read`.
  void keep_until(engine::Event read);
  /// For who writes masters and states: blocks until nobody reads or writes them.
  void settle();
  /// To be called on every rank where masters of `unit` are written: what is gathered or computed
  /// with is then renewed as Fsdp::load() says.
  void mark_stale(Unit& unit);
  /// While the result lives, steps and updates are refused, as what `holder` writes would be lost.
  [[nodiscard]] std::shared_ptr<const void> hold(std::string_view holder);

 private:
  friend class Fsdp;

  /// Throws InvalidArgument unless `values` are as many as `p` has.
  static void check_numel(const engine::Parameter& p, std::span<const float> values);
  /// load() that leaves what is gathered or computed with as it is.
  void write(const Location& at, const SplitTensor& owned, std::span<const float> values);

  Fsdp& fsdp_;
};

}  // namespace tessera::shard
