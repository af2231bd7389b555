// Values as they are cut over ranks, for who keeps or moves them: checkpoints, summon(), and what
// writes masters by their addresses.
//
//   CutValues values(fsdp);
//   values.check_at_rest("my snapshot");
//   const Location at = fsdp.location_of(p);
//   std::vector<float> whole = values.full(at, at.flat.master);
#pragma once

#include <functional>
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

  /// Elements [begin, begin + numel) of a parameter, and their values: a view of what lies there,
  /// (numel) in f32 or, frozen, in what is computed with.
  using OnPiece = std::function<void(Range elements, const engine::Tensor& values)>;
  /// Not collective, between steps: calls `fn` for each piece of `p` that this rank owns, in order;
  /// for none, perhaps. Values are on the device of the compute stream, or where parameters are
  /// offloaded on the host, and are the masters themselves: read by work of the compute stream, or
  /// by the host after its synchronize(). Several ranks own the same elements where owned parts are
  /// copies: mesh().world().size() / mesh().num_parts(location_of(p).flat.owner) do. Throws
  /// InvalidArgument inside a step or region, and for a parameter that is not wrapped.
  void for_each_owned(const engine::Parameter& p, const OnPiece& fn);
  /// for_each_owned() of what is laid out like Flat::master, such as an optimizer's state.
  static void for_each_owned(const Location& at, const SplitTensor& owned, const OnPiece& fn);

  /// For who reads or writes whole values: throws InvalidArgument inside a step, and while a region
  /// is open, naming its unit. `caller` is for the message.
  void check_at_rest(std::string_view caller);
  /// Between steps, for who reads masters and states while the next step runs, as a checkpoint
  /// does: nothing updates or loads them before `read`, whoever else reads them until when.
  void keep_until(engine::Event read);
  /// For who writes masters and states by work of the compute stream: that waits until what
  /// keep_until() was told of is over.
  void wait_until_read();
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
  /// Values of some elements of a parameter, valid until the next call.
  using Part = std::function<std::span<const float>(Range elements)>;
  /// Of the whole value of `p`. Throws as check_numel().
  static Part part_of(const engine::Parameter& p, std::span<const float> values);
  /// Fsdp::load().
  void load_master(const Location& at, const Part& part);
  /// Writes each piece of `owned`, and leaves what is gathered or computed with as it is.
  void write(const Location& at, const SplitTensor& owned, const Part& part);

  Fsdp& fsdp_;
};

}  // namespace tessera::shard
