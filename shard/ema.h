// An exponential moving average of the parameters, to evaluate with.
//
//   Ema ema(fsdp);
//   for (...) {
//     ... a step and its update ...
//     ema.update(/*decay=*/0.999);
//   }
//   ema.swap_in([&] { loss = tape.no_grad([&] { return model.loss(tape, x, targets); }); });
//
// Each rank averages the masters that it owns, where they lie, in f32 and element by element: bits
// are the same for every strategy and number of ranks. It is saved where CheckpointPart::ema says.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "engine/parameter.h"
#include "shard/flat_user.h"
#include "shard/fsdp.h"
#include "shard/split_tensor.h"

namespace tessera::shard {

/// Of the trainable parameters: what is frozen is left as it is, what is set free starts from its
/// value (Fsdp::trainable_changed()). Takes 4 bytes for each element that the rank owns, counted as
/// Category::kOptimizer.
class Ema : private FlatUser {
 public:
  /// Averages start as the parameters are. Between steps. `fsdp` outlives this.
  explicit Ema(Fsdp& fsdp);
  ~Ema() override;
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Not collective, after the update of a step, on every rank: average = decay * average +
  /// (1 - decay) * parameter, with the roundings of torch.lerp(), as work of the compute stream;
  /// with anything offloaded it first blocks until earlier work is done, and what lies in memory of
  /// the host is averaged when it returns. Throws InvalidArgument unless 0 <= decay <= 1, and
  /// inside a step or region.
  void update(double decay);
  /// update() with a decay of 0, to the bit.
  void reset();
  /// Collective: calls `fn` while the parameters have the values of their averages. Then they have
  /// their own again, if `fn` throws too. Throws InvalidArgument inside a step or region; in `fn`
  /// steps, updates and checkpoints are refused. On a GPU takes workspace of the size of the
  /// largest unit's masters meanwhile.
  void swap_in(const std::function<void()>& fn);
  /// Collective: the whole average of a trainable parameter, on every rank. Throws InvalidArgument
  /// for one that is frozen or not wrapped.
  std::vector<float> full_average(const engine::Parameter& p);
  /// What this rank has of the averages of the flat that a trainable parameter is in, laid out and
  /// lying like Flat::master. Throws InvalidArgument naming what is frozen.
  const SplitTensor& average(const Location& at) const;

 private:
  void before_recut(const Unit& unit) override;
  void after_recut(const Unit& unit) override;
  void create(const Unit& unit);
  void exchange(const engine::Tensor& workspace);

  Fsdp& fsdp_;
  std::map<const Unit*, SplitTensor> averages_;  // of trainable flats
  // While a unit is laid out again: its averages, whole.
  std::map<const engine::Parameter*, std::vector<float>> kept_;
};

}  // namespace tessera::shard
