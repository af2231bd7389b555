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
  std::string name;       ///< "powersgd.error", "powersgd.q" or "powersgd.step"
  std::string parameter;  ///< or, of what is the unit's, the name of the unit
  /// Of an error: whose of `num_parts` it is. Their sum is what is still owed to the parameters, so
  /// it may be divided among another number. Everything else is the same on all ranks.
  int part = 0, num_parts = 1;
  std::int64_t begin = 0;  ///< first element of the parameter
  std::int64_t numel = 0;

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

/// Part `part` of `num_parts` of the error of a parameter of which `state` holds all parts, however
/// they are cut. New part j is the sum of the old parts i for which i % num_parts == j, in double;
/// what its rounding to f32 leaves is given to the next one, so the sum over the new parts is that
/// over the old ones but for one rounding. `state` and `parameter` must outlive it.
class CutError {
 public:
  /// Throws InvalidArgument naming `parameter` if there is none, or parts are not of one number.
  CutError(const HookState& state, const std::string& parameter, int part, int num_parts);
  /// Throws InvalidArgument naming `parameter` unless each of its elements [begin, begin + numel)
  /// is there in every old part, once.
  void check(std::int64_t begin, std::int64_t numel) const;
  /// out = elements from `begin` on, which were checked.
  void read(std::int64_t begin, std::span<float> out) const;

 private:
  void add(std::span<double> sum, std::size_t old, std::int64_t begin) const;

  const HookState& state_;
  const std::string& parameter_;
  std::size_t part_, num_parts_;
  std::vector<std::vector<std::size_t>> tensors_;  // of each old part, by their first element
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
