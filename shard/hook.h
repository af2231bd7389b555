// What the communication hooks that come with the engine say of themselves, and what they remember
// from step to step, for whoever logs or saves it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/parameter.h"
#include "shard/reducer.h"

namespace tessera::shard {

/// What one reduction sends for a parameter.
struct HookTraffic {
  const engine::Parameter* parameter;
  std::int64_t rank;     ///< of its approximation; 0: sent whole
  double nbytes_before;  ///< of the gradient in f32
  double nbytes_after;   ///< per rank, in what it sends to be summed
};

/// A part of what a hook remembers, by name.
struct HookTensor {
  std::string name;       ///< "powersgd.error", "powersgd.q" or "powersgd.step"
  std::string parameter;  ///< or, of what is the unit's, the name of the unit
  /// Of an error: whose of `num_parts` it is. Their sum is what is still owed to the parameters, so
  /// it may be divided among another number. Everything else is the same on all ranks.
  int part = 0, num_parts = 1;
  std::int64_t begin = 0;  ///< first element of the parameter
  std::vector<float> values = {};

  friend bool operator==(const HookTensor&, const HookTensor&) = default;
};

class HookReducer : public Reducer {
 public:
  /// Of each parameter, in the order of the flat.
  virtual std::vector<HookTraffic> traffic() const = 0;
  /// What this rank remembers, on the device or, of `on_host`, in the host's memory.
  virtual std::int64_t error_nbytes(bool on_host) const {
    (void)on_host;
    return 0;
  }
  /// Between steps, when the stream has nothing to do: all of it. Tensors that are the same on all
  /// ranks are there on rank 0 alone.
  virtual std::vector<HookTensor> state() const { return {}; }
  /// Takes over what all ranks of some run had, of which this uses its own share: with as many
  /// parts as here its own part as it was. Throws InvalidArgument naming what is missing or does
  /// not fit.
  virtual void load(std::span<const HookTensor> of_all_ranks) { (void)of_all_ranks; }

 protected:
  using Reducer::Reducer;
};

/// Elements [begin, begin + numel) of part `part` of `num_parts` of an error of which
/// `of_all_ranks` holds all parts, however they are cut. New part j is the sum of the old parts i
/// for which i % num_parts == j, in double; what its rounding to f32 leaves is given to the next
/// one, so the sum over the new parts is that over the old ones but for one rounding. Throws
/// InvalidArgument naming `parameter` if an element of a part is missing or there twice.
std::vector<float> cut_error(std::span<const HookTensor> of_all_ranks, const std::string& parameter,
                             int part, int num_parts, std::int64_t begin, std::int64_t numel);

class Fsdp;
/// What this rank's hooks remember, and the other way round; see HookReducer. Blocks until
/// collectives are done. Empty, and nothing, without such hooks.
std::vector<HookTensor> save_hooks(const Fsdp& fsdp);
void load_hooks(const Fsdp& fsdp, std::span<const HookTensor> of_all_ranks);

}  // namespace tessera::shard
