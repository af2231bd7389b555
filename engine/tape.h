// The tape records what backward must do, in program order, and then does it once, in reverse.
// Reverse program order is a topological order: there is no graph and no search.
//
//   Tape tape(memory, compute);
//   Tensor h = tape.region(
//       layer.block, {.recompute = true},
//       [&](const Tensor& x) { return ops::gelu(tape, ops::linear(tape, x, layer.w, &layer.b)); },
//       x);  // not by [&]: the function runs again in backward
//   tape.backward(loss);
//
// One tape per rank; not thread-safe. See [Note: gradient accumulation] and [Note: recomputed
// regions] in tape.cc.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/parameter.h"
#include "engine/region_hooks.h"
#include "engine/saved_values.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// Where an op writes a gradient: `dst` undefined means nobody wants it.
struct GradTarget {
  Tensor dst;
  bool accumulate = false;         ///< add to what is there; otherwise assign every element
  bool wants_column_sums = false;  ///< whoever can may Tape::leave_column_sums() of dst
  explicit operator bool() const { return dst.defined(); }
};

struct RegionOptions {
  bool recompute = false;  ///< forward keeps nothing; backward runs `fn` again first
};

class Tape {
 public:
  /// Throws InvalidArgument unless `memory` is of the device of `compute`, its home on a GPU.
  /// With MemoryOptions::check_saved of `memory`, backward throws InvalidArgument where a tensor is
  /// not what an op saved, or a recomputed region gives another output than before.
  Tape(Memory memory, Stream compute);

  const Memory& memory() const { return memory_; }
  const Stream& stream() const { return compute_; }
  /// From now on tells `listener`, which outlives this; null: nobody. Between steps.
  void listen(BorderListener* listener) { listener_ = listener; }
  /// A new activation, uninitialised.
  Tensor empty(const Shape& shape, DType dtype, std::string_view name);

  // For ops ---------------------------------------------------------------------------------------

  using Backward = std::function<void(const Tensor& dout)>;
  /// Called by an op after it computed `out`; `backward` writes the gradients of the op's inputs.
  /// It runs only if somebody's gradient reached `out`. What it captures is what is saved.
  void record(std::string_view op, const Tensor& out, Backward backward);
  /// For an op with several outputs: runs if a gradient reached any; missing ones are undefined.
  void record(std::string_view op, const std::vector<Tensor>& outs,
              std::function<void(const std::vector<Tensor>& douts)> backward);
  /// Counts a use of `p` and returns its value. Ops read parameters through this alone.
  /// Throws InvalidArgument if the parameter has no value or is released.
  const Tensor& use(Parameter& p);
  /// Gradient of an activation or of a parameter, ready to be written. Call once per backward and
  /// input, just before writing.
  /// Throws InvalidArgument for a tensor whose gradient would be lost, as needs_grad() does.
  GradTarget grad_target(const Tensor& x);
  GradTarget grad_target(Parameter& p);
  /// The gradient of `x` is `dx` itself (or grows by it): for ops that pass a gradient through.
  /// Throws InvalidArgument if numel or dtype differ from `x`.
  void pass_grad(const Tensor& x, const Tensor& dx);
  /// Asks, as `y` is made, for the sums of the columns of its gradient, which the gradient of a
  /// bias is: see [Note: sums left beside gradients] in tape.cc. Nothing on a CPU.
  void want_column_sums(const Tensor& y);
  bool wants_column_sums(const Tensor& y) const;
  /// By who has just launched what writes all of a gradient `dx` (..., C): `parts` (n, C), f32, add
  /// up to the sums of its columns. Throws InvalidArgument for another shape or dtype.
  void leave_column_sums(const Tensor& dx, const Tensor& parts);
  /// What was left with `dy` as it is now, or undefined.
  Tensor column_sums(const Tensor& dy) const;
  /// Will anybody want the gradient of `x`, or of `p`? False for data, for frozen parameters, for
  /// all parameters inside frozen(), and while not recording. An op asks before it launches: it
  /// saves only what the gradients that are wanted need, and if none is, it does not record, and
  /// its output is data in turn.
  /// Throws InvalidArgument for a tensor whose gradient would be lost: a slice of an activation or
  /// of a watched tensor, and what left a recomputed region otherwise than as its output.
  bool needs_grad(const Tensor& x);
  bool needs_grad(const Parameter& p);
  bool recording() const { return pass_ == Pass::kRecorded; }
  /// Inside frozen(), or in the backward of what ran there.
  bool is_frozen() const { return is_frozen_; }
  Pass pass() const { return pass_; }

  // For models ------------------------------------------------------------------------------------

  /// Runs `fn` as one region of `block`: its hooks fire around it now and, reversed, in backward.
  /// `block` must outlive the recording. With `recompute`, backward calls a copy of `fn` again,
  /// after the scope that made it has ended: capture tensors by value, for a reference to one
  /// dangles by then. Where a tensor whose gradient the region gives is gone, backward throws
  /// InvalidArgument that names both. The second call must compute what the first did. A tensor
  /// leaves a recomputed region only as an output: one assigned to an outer variable has no
  /// gradient, and an op that needs it throws.
  Tensor region(const Block& block, const std::function<Tensor()>& fn, RegionOptions options = {});
  /// A region with several outputs, e.g. a hidden state and an auxiliary loss.
  std::vector<Tensor> region(const Block& block, const std::function<std::vector<Tensor>()>& fn,
                             RegionOptions options = {});
  /// A region of `fn(inputs...)`. With `recompute` the tape keeps the inputs and a copy of `fn`,
  /// which then needs no tensor of a scope that is gone: [&] may refer to the tape and the model.
  template <class F, std::same_as<Tensor>... Inputs>
  auto region(const Block& block, RegionOptions options, F fn, Inputs... inputs) {
    using Results = std::invoke_result_t<const F&, const Inputs&...>;
    return region(block, std::function<Results()>([fn, inputs...] { return fn(inputs...); }),
                  options);
  }
  /// Runs `fn` without recording.
  template <class F>
  auto no_grad(F&& fn) {
    const PassScope scope(*this, Pass::kUnrecorded);
    return std::forward<F>(fn)();
  }
  /// Runs `fn` with all parameters as if they were frozen: gradients pass through to inputs, and
  /// parameters get none of what is recorded here, such as those of a discriminator while its
  /// generator learns. Under Fsdp its backward needs no step, and reduces nothing.
  template <class F>
  auto frozen(F&& fn) {
    const FrozenScope scope(*this, true);
    return std::forward<F>(fn)();
  }
  /// Asks for the gradient of a leaf (an input), before the ops that use it, in every backward
  /// until `x` dies or clear(); read it with grad(). Throws InvalidArgument for a tensor that left
  /// a recomputed region otherwise than as its output.
  void watch(const Tensor& x);
  /// Gradient of a watched tensor in the last backward() alone; undefined if none reached it.
  /// Whoever wants the sum over several backwards adds them up. The tape lets go of the gradient
  /// with the next backward() or clear(), or when a watch() before a forward finds `x` dead.
  Tensor grad(const Tensor& x) const;

  /// `loss` has one element; its gradient starts as `seed`. Runs every entry once, last to first,
  /// freeing each. Throws InvalidArgument inside no_grad, and if `loss` was not recorded here, or
  /// depends on nothing that wants a gradient; errors of ops and hooks pass through, and then the
  /// tape is cleared.
  void backward(const Tensor& loss, float seed = 1) { backward(std::vector<Tensor>{loss}, seed); }
  /// Backward of a sum of losses, e.g. of several forwards.
  void backward(const std::vector<Tensor>& losses, float seed = 1);
  /// Forgets everything recorded, and watched gradients.
  void clear();

  /// Uses of `p` recorded and not yet run backward, counted down once the entry of a use has run:
  /// 0 in backward means that its gradient is final, 0 before it that it was not used. A recomputed
  /// region holds its uses until its second forward has recorded them again. The use of an op that
  /// does not record is counted until the next entry of its region.
  std::int64_t pending_uses(const Parameter& p) const;
  /// Entries recorded and not yet run backward: more than 0 between steps means a forward without
  /// backward, such as an evaluation outside no_grad().
  std::size_t num_entries() const { return entries_.size(); }
  /// The entries that num_entries() counts, for error messages: "3 entries, the first of op
  /// 'linear', the last of region 'h.0'".
  std::string describe_entries() const;

 private:
  using Outputs = std::function<std::vector<Tensor>()>;
  struct Out {
    TensorKey key;
    Shape shape;
    std::size_t index = 0;  // of regions and replays: among the results of `fn`
  };
  struct ColumnSums {
    std::weak_ptr<Buffer> gradient;
    Tensor parts;
  };
  struct Watched {
    std::weak_ptr<Buffer> buffer;
    std::int64_t nbytes;
  };
  // What a region that is to be recomputed read, made outside and with a gradient.
  struct Read {
    std::weak_ptr<Buffer> buffer;
    std::string name;
  };
  struct Entry {
    enum class Kind { kOp, kRegionBegin, kRegionEnd, kReplay };
    Kind kind = Kind::kOp;
    std::string_view op = {};
    std::vector<Out> outs = {};
    std::function<void(const std::vector<Tensor>&)> backward = {};
    std::vector<Parameter*> used = {};  // whose uses this entry counted
    const Block* block = nullptr;       // regions and replays
    Outputs fn = {};                    // replays
    bool is_frozen = false;
    std::vector<Read> read = {};              // replays
    SavedValues saved = {};                   // with MemoryOptions::check_saved
    std::vector<std::uint64_t> results = {};  // then, of replays: checksums of `outs`

    std::string str() const;
  };
  // What the outermost region that is to be recomputed has seen in its first run.
  struct Deferred {
    bool wanted = false;              // an op asked for a gradient that somebody wants
    std::vector<std::uint64_t> made;  // serials of what its ops made
    std::vector<Read> read;
  };
  class PassScope {
   public:
    PassScope(Tape& tape, Pass pass) : tape_(tape), before_(std::exchange(tape.pass_, pass)) {}
    ~PassScope() { tape_.pass_ = before_; }
    PassScope(const PassScope&) = delete;
    PassScope& operator=(const PassScope&) = delete;

   private:
    Tape& tape_;
    Pass before_;
  };

  class FrozenScope {
   public:
    FrozenScope(Tape& tape, bool is_frozen)
        : tape_(tape), before_(std::exchange(tape.is_frozen_, is_frozen)) {}
    ~FrozenScope() { tape_.is_frozen_ = before_; }
    FrozenScope(const FrozenScope&) = delete;
    FrozenScope& operator=(const FrozenScope&) = delete;

   private:
    Tape& tape_;
    bool before_;
  };

  std::vector<Tensor> run_region(const Block& block, const Outputs& fn, Outputs again);
  std::vector<Tensor> defer(const Block& block, const Outputs& fn, Outputs again);
  void push(Entry entry);
  void begin_region(const Block& block);
  Entry end_of(const Block& block, const std::vector<Tensor>& results) const;
  void tell_outputs(const Block& block, const std::vector<Tensor>& results) const;
  void tell_gradients(const Entry& entry) const;
  void skip(std::span<const Tensor> outs);
  void forget_dead();
  void made(const Tensor& t);
  void count_down(const std::vector<Parameter*>& used);
  void drop_column_sums(const Tensor& grad) { column_sums_.erase(grad.key()); }
  void run(Entry& entry);
  void run_op(Entry& entry);
  void replay(Entry& entry);
  void begin_scope(const Block& block);
  void end_scope();
  Out produce(const Tensor& out);
  bool wants_grad(const Tensor& x) const;
  void refuse_lost_gradient(const Tensor& x) const;
  void refuse_escaped(const Tensor& x) const;
  std::vector<Tensor> take_grads(const Entry& entry);
  Tensor take_grad(const Out& out);

  Memory memory_;
  Stream compute_;
  Pass pass_ = Pass::kRecorded;
  bool is_frozen_ = false;
  std::vector<Entry> entries_;
  std::uint64_t num_recorded_ = 0;  // ops and replays, ever
  std::vector<Parameter*> used_;    // since the last entry
  std::unordered_map<TensorKey, Tensor, TensorKeyHash> grads_;
  std::unordered_map<TensorKey, std::int64_t, TensorKeyHash> summed_;     // wanted: tensor, columns
  std::unordered_map<TensorKey, ColumnSums, TensorKeyHash> column_sums_;  // left: of gradients
  std::unordered_set<TensorKey, TensorKeyHash> produced_;
  std::unordered_set<std::uint64_t> produced_serials_;
  Deferred deferred_;
  std::unordered_map<std::uint64_t, const Block*> inside_;  // serials made in recomputed regions
  std::unordered_map<TensorKey, Watched, TensorKeyHash> watched_;
  std::unordered_map<const Parameter*, std::int64_t> pending_uses_;
  std::string_view forward_phase_ = "forward";  // of scopes
  int num_open_scopes_ = 0;                     // of regions in backward
  BorderListener* listener_ = nullptr;
};

}  // namespace tessera::engine
