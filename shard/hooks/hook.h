// What the communication hooks that come with the engine say of themselves, and what they remember
// from step to step, for whoever logs or saves it.
#pragma once

#include <cstdint>
#include <optional>
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

/// Which part of what a hook remembers.
struct HookTensorInfo {
  /// HOOK.TENSOR, as "powersgd.error" or "topk.error". Errors say the part before the point.
  std::string name;
  std::string parameter;  ///< or, of what is the unit's, the name of the unit
  /// Of what differs between ranks: whose of `num_parts` it is; cut_error.h says how another number
  /// of ranks takes it over. Otherwise it is the same on all ranks, and there on rank 0 alone.
  int part = 0, num_parts = 1;
  std::int64_t begin = 0;  ///< its first element, counted in the whole tensor
  std::int64_t numel = 0;
  /// Elements of the whole tensor, all of which must be there once in each part; 0: `numel`.
  std::int64_t whole_numel = 0;

  friend bool operator==(const HookTensorInfo&, const HookTensorInfo&) = default;
};

/// A part of what a hook remembers.
struct HookTensor : HookTensorInfo {
  std::vector<float> values;  ///< numel of them

  friend bool operator==(const HookTensor&, const HookTensor&) = default;
};

/// What the hooks of all ranks of some run remembered, in memory or in files.
class HookState {
 public:
  HookState() = default;
  HookState(const HookState&) = delete;
  HookState& operator=(const HookState&) = delete;
  virtual ~HookState() = default;

  virtual std::span<const HookTensorInfo> tensors() const = 0;
  /// out = elements [first, first + out.size()) of tensors()[index].
  virtual void read(std::size_t index, std::int64_t first, std::span<float> out) const = 0;
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
  /// Does it remember anything beyond a step? The same on all ranks.
  virtual bool has_state() const { return false; }
  /// Between steps, when the stream has nothing to do: all of it. Tensors that are the same on all
  /// ranks are there on rank 0 alone.
  virtual std::vector<HookTensor> state() const { return {}; }
  /// Whether load() takes over `info` (name and parameter are enough), or leaves out what a hook
  /// with other options remembered of its parameters; none if it knows nothing of them. The same on
  /// all ranks.
  virtual std::optional<bool> takes(const HookTensorInfo& info) const {
    (void)info;
    return std::nullopt;
  }
  /// Takes over what all ranks of some run had, of which this reads its own share: with as many
  /// parts as here its own part as it was. Throws InvalidArgument naming what is missing or does
  /// not fit, before anything is taken over.
  virtual void load(const HookState& of_all_ranks) { (void)of_all_ranks; }

 protected:
  using Reducer::Reducer;
};

class Fsdp;
/// What this rank's hooks remember, and the other way round; see HookReducer. Blocks until
/// collectives are done. Empty, and nothing, without such hooks. With NonFinite::kSkip to be called
/// after the update, which decides whether the step counts; throws InvalidArgument inside a step.
std::vector<HookTensor> save_hooks(const Fsdp& fsdp);
void load_hooks(const Fsdp& fsdp, const HookState& of_all_ranks);
void load_hooks(const Fsdp& fsdp, std::span<const HookTensor> of_all_ranks);
/// Is there anything that save_hooks() gives on some rank?
bool have_hooks_state(const Fsdp& fsdp);

}  // namespace tessera::shard
