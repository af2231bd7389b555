#include "engine/tape.h"

#include <algorithm>

#include "engine/elementwise.h"

namespace tessera::engine {

// [Note: gradient accumulation]
// Gradients of activations live in grads_, keyed by the identity of the elements. The first writer
// assigns, later ones add: grad_target() says which, so no gradient is ever zero-filled first. An
// op that passes a gradient through hands over the tensor itself (pass_grad); a tensor shared in
// that way is copied before somebody adds to it. The entry that produced `x` takes the gradient of
// `x` out of the map, so memory falls as backward proceeds. Only the gradients of watched tensors
// stay, for grad(), until the next backward: each starts from nothing.
//
// Gradients of parameters are views preassigned by the owner of the parameter. The first write of a
// pass assigns as well, and is remembered in Parameter::grad_written; the owner zero-fills what was
// not written when it needs the whole flat buffer.
//
// [Note: sums left beside gradients]
// The gradient of a bias is the sum of the columns of a gradient dy. On a GPU, reading dy for that
// alone costs as much as what wrote it. So the op with the bias asks for the sums as it makes y, in
// every pass that may lead to a backward; an op whose output has the gradient of y (an addition)
// asks in turn; and an op that writes that gradient, knowing each element as it does, leaves the
// sums of blocks of rows beside it. They belong to the gradient's memory and not to y, so they stay
// with it where it is passed on; whoever is about to add to that memory drops them, may leave new
// ones of the whole, and if nobody does, the op with the bias reads dy after all. What is asked for
// depends on the model alone, so the bits do as well: not on strategies or recomputation.
//
// [Note: recomputed regions]
// The first run of a recomputed region records nothing: its ops say, by asking for gradients, only
// whether it is to run again at all, and one entry stands for it, with its outputs. The second run
// records, and is handed the gradients of those outputs. So a tensor of the first run that is no
// output has no way back: such tensors are known by the serials of their buffers, and refused where
// a gradient of theirs is asked for. An output that was there before the region is not the
// region's: it keeps the gradient that it has, and the region hands none in.

namespace {

std::string gradient_name(const Tensor& x) {
  std::string name = "d";
  return name += x.name();
}

// Says what a stream works for.
class InScope {
 public:
  InScope(const Stream& stream, Scope scope) : stream_(stream) { stream_.push_scope(scope); }
  ~InScope() { stream_.pop_scope(); }
  InScope(const InScope&) = delete;
  InScope& operator=(const InScope&) = delete;

 private:
  const Stream& stream_;
};

// Of a region that an exception ends.
void leave(const Block& block, Tape& tape) noexcept {
  if (block.hooks == nullptr) return;
  try {
    block.hooks->after_forward(block, tape, false);
  } catch (...) {  // whoever waits is told of what came first
  }
}

}  // namespace

Tape::Tape(Memory memory, Stream compute)
    : memory_(std::move(memory)), compute_(std::move(compute)) {
  require(memory_.device() == compute_.device() && (!memory_.home() || *memory_.home() == compute_),
          "[tape] expected memory of the stream it works on, got {} of another than '{}' of {}",
          to_string(memory_.device()), compute_.name(), to_string(compute_.device()));
}

Tensor Tape::empty(const Shape& shape, DType dtype, std::string_view name) {
  Tensor t = Tensor::empty(memory_, shape, dtype, name, Category::kActivation);
  if (pass_ == Pass::kDeferred) made(t);
  return t;
}

void Tape::made(const Tensor& t) {
  if (t.dtype() == DType::kF32 || t.dtype() == DType::kBF16) {
    deferred_.made.push_back(t.key().serial);
  }
}

void Tape::push(Entry entry) {
  num_recorded_ += entry.kind == Entry::Kind::kOp || entry.kind == Entry::Kind::kReplay ? 1 : 0;
  entry.used = std::exchange(used_, {});
  entry.is_frozen = is_frozen_;
  entries_.push_back(std::move(entry));
}

void Tape::record(std::string_view op, const Tensor& out, Backward backward) {
  if (!recording()) return skip({&out, 1});
  record(op, std::vector<Tensor>{out},
         [backward = std::move(backward)](const std::vector<Tensor>& douts) {
           backward(douts.front());
         });
}

void Tape::record(std::string_view op, const std::vector<Tensor>& outs,
                  std::function<void(const std::vector<Tensor>&)> backward) {
  if (!recording()) return skip(outs);
  Entry entry{.op = op, .backward = std::move(backward)};
  if (memory_.checks_saved()) entry.saved = {memory_, compute_, entry.backward};
  for (const Tensor& out : outs) entry.outs.push_back(produce(out));
  push(std::move(entry));
}

// An op that would have recorded.
void Tape::skip(std::span<const Tensor> outs) {
  if (pass_ != Pass::kDeferred) return;
  deferred_.wanted = true;
  for (const Tensor& out : outs) made(out);
}

Tape::Out Tape::produce(const Tensor& out) {
  produced_.insert(out.key());
  produced_serials_.insert(out.key().serial);
  return {out.key(), out.shape()};
}

const Tensor& Tape::use(Parameter& p) {
  require(p.value.defined(),
          "[tape] expected a parameter with a value: wrap or materialize it ({})", p.name);
  require(p.value.buffer()->resident(),
          "[tape] expected a resident parameter, got a use while it is sharded: use it inside the "
          "region of its block ({})",
          p.name);
  if (pass_ != Pass::kUnrecorded && !is_frozen_) {
    used_.push_back(&p);
    ++pending_uses_[&p];
  }
  return p.value;
}

bool Tape::needs_grad(const Tensor& x) {
  if (pass_ == Pass::kUnrecorded || !wants_grad(x)) return false;
  deferred_.wanted = true;
  if (pass_ == Pass::kDeferred) deferred_.read.push_back({x.buffer(), x.name()});
  return recording();
}

bool Tape::needs_grad(const Parameter& p) {
  if (pass_ == Pass::kUnrecorded || is_frozen_ || !p.trainable) return false;
  deferred_.wanted = true;
  return recording();
}

bool Tape::wants_grad(const Tensor& x) const {
  const TensorKey key = x.key();
  if (produced_.contains(key) || watched_.contains(key)) return true;
  if (key.memory == memory_.id()) refuse_lost_gradient(x);
  return false;
}

// For an `x` that is neither recorded nor watched as a whole.
void Tape::refuse_lost_gradient(const Tensor& x) const {
  const TensorKey key = x.key();
  bool is_slice = produced_serials_.contains(key.serial);
  for (const auto& [watched, about] : watched_) {
    is_slice = is_slice || (watched.memory == key.memory && watched.serial == key.serial &&
                            watched.offset_nbytes < key.offset_nbytes + x.nbytes() &&
                            key.offset_nbytes < watched.offset_nbytes + about.nbytes);
  }
  require(!is_slice,
          "[tape] expected a whole activation or watched tensor, got a slice of one: its gradient "
          "would be lost ({})",
          x.name());
  refuse_escaped(x);
}

void Tape::refuse_escaped(const Tensor& x) const {
  if (inside_.empty() || x.key().memory != memory_.id()) return;
  const auto it = inside_.find(x.key().serial);
  if (it == inside_.end()) return;
  fail(
      "[region] expected outputs of the recomputed region of {}, got a tensor made inside that "
      "left "
      "it by capture: its gradient would be lost; return it as one of several outputs ({})",
      it->second->name, x.name());
}

GradTarget Tape::grad_target(const Tensor& x) {
  if (!wants_grad(x)) return {};
  Tensor& grad = grads_[x.key()];
  if (!grad.defined()) {
    grad = Tensor::empty(memory_, x.shape(), x.dtype(), gradient_name(x));
    return {grad, false, wants_column_sums(x)};
  }
  if (grad.buffer().use_count() > 1) {  // shared by pass_grad
    const Tensor own = Tensor::empty(memory_, x.shape(), x.dtype(), gradient_name(x));
    launch_assign_or_add(compute_, own, grad, false, "tape.copy_grad");
    grad = own;
  }
  drop_column_sums(grad);
  return {grad.reshape(x.shape()), true, wants_column_sums(x)};
}

GradTarget Tape::grad_target(Parameter& p) {
  if (is_frozen_ || !p.trainable) return {};
  require(p.grad.defined(), "[tape] expected a gradient view for a trainable parameter ({})",
          p.name);
  require(p.grad.shape() == p.shape, "[tape] expected a gradient of shape {}, got {} ({})", p.shape,
          p.grad.shape(), p.name);
  return {p.grad, std::exchange(p.grad_written, true)};
}

void Tape::pass_grad(const Tensor& x, const Tensor& dx) {
  require(dx.numel() == x.numel() && dx.dtype() == x.dtype(),
          "[tape] expected a gradient {} {}, got {} {} ({})", name_of(x.dtype()), x.shape(),
          name_of(dx.dtype()), dx.shape(), x.name());
  if (!wants_grad(x)) return;
  Tensor& grad = grads_[x.key()];
  if (!grad.defined()) {
    grad = dx;
  } else {
    launch_assign_or_add(compute_, grad_target(x).dst, dx, true, "tape.add_grad");
  }
}

void Tape::want_column_sums(const Tensor& y) {
  if (pass_ == Pass::kUnrecorded || !compute_.device().is_cuda()) return;
  summed_[y.key()] = y.dim(-1);
}

bool Tape::wants_column_sums(const Tensor& y) const {
  const auto it = summed_.find(y.key());
  return it != summed_.end() && y.shape().rank() > 0 && y.dim(-1) == it->second;
}

void Tape::leave_column_sums(const Tensor& dx, const Tensor& parts) {
  require(parts.shape().rank() == 2 && parts.dim(1) == dx.dim(-1) && parts.dtype() == DType::kF32,
          "[tape] expected sums (n, {}) f32, got {} {} ({})", dx.dim(-1), parts.shape(),
          name_of(parts.dtype()), dx.name());
  column_sums_.insert_or_assign(dx.key(), ColumnSums{dx.buffer(), parts});
}

Tensor Tape::column_sums(const Tensor& dy) const {
  const auto it = column_sums_.find(dy.key());
  const bool fits = it != column_sums_.end() && it->second.parts.dim(1) == dy.dim(-1);
  return fits ? it->second.parts : Tensor();
}

Tensor Tape::region(const Block& block, const std::function<Tensor()>& fn, RegionOptions options) {
  const auto once = [&fn] { return std::vector<Tensor>{fn()}; };
  const auto again = [&fn]() -> Outputs { return [fn] { return std::vector<Tensor>{fn()}; }; };
  return run_region(block, once, options.recompute ? again() : Outputs()).front();
}

std::vector<Tensor> Tape::region(const Block& block, const std::function<std::vector<Tensor>()>& fn,
                                 RegionOptions options) {
  return run_region(block, fn, options.recompute ? fn : Outputs());
}

// `again` is empty unless the region is to be recomputed.
std::vector<Tensor> Tape::run_region(const Block& block, const Outputs& fn, Outputs again) {
  const InScope scope(compute_, {block.name, forward_phase_});
  if (block.hooks != nullptr) block.hooks->before_forward(block, *this);
  const std::uint64_t num_before = num_recorded_;
  std::vector<Tensor> results;
  try {
    if (recording() && again) {
      results = defer(block, fn, std::move(again));
    } else {
      if (recording()) begin_region(block);
      results = fn();
      if (recording()) push(end_of(block, results));
    }
  } catch (...) {
    // One that is recorded is part of a step, which is given up. Where it is not, as in frozen(),
    // the next step closes it.
    if (pass_ == Pass::kUnrecorded) leave(block, *this);
    throw;
  }
  tell_outputs(block, results);
  if (block.hooks != nullptr) {
    block.hooks->after_forward(block, *this, num_recorded_ != num_before);
  }
  return results;
}

// Uses before it belong to the entry after it.
void Tape::begin_region(const Block& block) {
  entries_.push_back({.kind = Entry::Kind::kRegionBegin, .block = &block, .is_frozen = is_frozen_});
}

// A listener is told the gradients of what the region hands out: by then they are complete.
Tape::Entry Tape::end_of(const Block& block, const std::vector<Tensor>& results) const {
  Entry entry{.kind = Entry::Kind::kRegionEnd, .block = &block};
  for (std::size_t i = 0; listener_ != nullptr && i < results.size(); ++i) {
    if (results[i].defined()) entry.outs.push_back({results[i].key(), results[i].shape(), i});
  }
  return entry;
}

void Tape::tell_outputs(const Block& block, const std::vector<Tensor>& results) const {
  if (listener_ == nullptr || pass_ == Pass::kUnrecorded) return;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].defined()) listener_->on_output(block, i, results[i], forward_phase_);
  }
}

void Tape::tell_gradients(const Entry& entry) const {
  if (listener_ == nullptr) return;
  for (const Out& out : entry.outs) {
    const auto it = grads_.find(out.key);
    if (it == grads_.end()) continue;
    listener_->on_output_gradient(*entry.block, out.index, it->second.reshape(out.shape));
  }
}

std::vector<Tensor> Tape::defer(const Block& block, const Outputs& fn, Outputs again) {
  deferred_ = {};
  const std::uint64_t first = memory_.next_serial();
  std::vector<Tensor> results;
  {
    const PassScope scope(*this, Pass::kDeferred);
    results = fn();
  }
  if (!deferred_.wanted) {  // nothing to run again; the hooks fire in pairs all the same
    begin_region(block);
    push({.kind = Entry::Kind::kRegionEnd, .block = &block});
    return results;
  }
  for (const std::uint64_t serial : deferred_.made) inside_.emplace(serial, &block);
  Entry entry{.kind = Entry::Kind::kReplay,
              .block = &block,
              .fn = std::move(again),
              .read = std::move(deferred_.read)};
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const TensorKey key = results[i].key();
    const bool is_own = key.memory == memory_.id() && key.serial >= first;
    const bool is_new = std::none_of(entry.outs.begin(), entry.outs.end(),
                                     [&](const Out& out) { return out.key == key; });
    if (is_own && is_new) {
      entry.outs.push_back(produce(results[i]));
      entry.outs.back().index = i;
      if (memory_.checks_saved()) entry.results.push_back(checksum_of(compute_, results[i]));
    }
  }
  if (memory_.checks_saved()) entry.saved = {memory_, compute_, entry.fn};
  push(std::move(entry));
  return results;
}

void Tape::watch(const Tensor& x) {
  if (!produced_.contains(x.key())) refuse_escaped(x);
  if (entries_.empty()) forget_dead();
  watched_.emplace(x.key(), Watched{x.buffer(), x.nbytes()});
}

// Nobody reads the gradient of a tensor that is gone; entries may still mean to write it.
void Tape::forget_dead() {
  std::erase_if(watched_, [](const auto& item) { return item.second.buffer.expired(); });
  std::erase_if(grads_, [this](const auto& item) { return !watched_.contains(item.first); });
}

Tensor Tape::grad(const Tensor& x) const {
  const auto it = grads_.find(x.key());
  return it == grads_.end() ? Tensor() : it->second.reshape(x.shape());
}

void Tape::backward(const std::vector<Tensor>& losses, float seed) {
  require(recording(), "[backward] expected a tape that records, got a call inside no_grad");
  for (const Tensor& loss : losses) {
    require(loss.numel() == 1, "[backward] expected a loss of one element, got {} ({})",
            loss.shape(), loss.name());
    if (!produced_.contains(loss.key())) refuse_escaped(loss);
    require(produced_.contains(loss.key()),
            "[backward] expected a loss that was recorded on this tape, depends on something "
            "trainable or watched and has not run backward ({})",
            loss.name());
  }
  // What the backward before left for grad().
  std::erase_if(grads_, [this](const auto& item) { return !produced_.contains(item.first); });
  for (const Tensor& loss : losses) {
    const Tensor dloss = empty(loss.shape(), loss.dtype(), "dloss");
    launch_set(compute_, dloss, seed, "tape.dloss");
    pass_grad(loss, dloss);
  }
  count_down(std::exchange(used_, {}));  // no entry came after them
  try {
    while (!entries_.empty()) {
      Entry entry = std::move(entries_.back());
      entries_.pop_back();
      run(entry);
      count_down(entry.used);
      std::erase_if(column_sums_, [](const auto& s) { return s.second.gradient.expired(); });
    }
  } catch (...) {
    while (num_open_scopes_ > 0) end_scope();
    forward_phase_ = "forward";
    clear();
    throw;
  }
  forget_dead();
  summed_.clear();
  column_sums_.clear();
  produced_.clear();
  produced_serials_.clear();
  inside_.clear();
}

void Tape::count_down(const std::vector<Parameter*>& used) {
  for (const Parameter* p : used) --pending_uses_[p];
}

void Tape::run(Entry& entry) {
  const FrozenScope scope(*this, entry.is_frozen);
  RegionHooks* hooks = entry.block == nullptr ? nullptr : entry.block->hooks;
  switch (entry.kind) {
    case Entry::Kind::kOp:
      run_op(entry);
      break;
    case Entry::Kind::kRegionEnd:
      begin_scope(*entry.block);
      tell_gradients(entry);
      if (hooks != nullptr) hooks->before_backward(*entry.block, *this);
      break;
    case Entry::Kind::kRegionBegin:
      if (hooks != nullptr) hooks->after_backward(*entry.block, *this);
      end_scope();
      break;
    case Entry::Kind::kReplay:
      begin_scope(*entry.block);
      tell_gradients(entry);
      if (hooks != nullptr) hooks->before_backward(*entry.block, *this);
      replay(entry);
      break;
  }
}

void Tape::begin_scope(const Block& block) {
  compute_.push_scope({block.name, "backward"});
  ++num_open_scopes_;
}

void Tape::end_scope() {
  compute_.pop_scope();
  --num_open_scopes_;
}

void Tape::run_op(Entry& entry) {
  const std::vector<Tensor> douts = take_grads(entry);
  if (douts.empty()) return;
  if (memory_.checks_saved()) entry.saved.check(compute_, entry.str());
  entry.backward(douts);
}

// One for each output of the entry; none at all if no gradient reached any.
std::vector<Tensor> Tape::take_grads(const Entry& entry) {
  std::vector<Tensor> douts;
  bool reached = false;
  for (const Out& out : entry.outs) {
    douts.push_back(take_grad(out));
    reached = reached || douts.back().defined();
  }
  if (!reached) douts.clear();
  return douts;
}

// The gradient of `out` in its shape, whatever views of it were used; undefined if none reached it.
Tensor Tape::take_grad(const Out& out) {
  produced_.erase(out.key);
  const auto it = grads_.find(out.key);
  if (it == grads_.end()) return {};
  const Tensor grad = it->second.reshape(out.shape);
  if (!watched_.contains(out.key)) grads_.erase(it);
  return grad;
}

namespace {

// What the region's function refuses is not what the caller of backward() did.
std::vector<Tensor> run_again(const Block& block, const std::function<std::vector<Tensor>()>& fn) {
  try {
    return fn();
  } catch (const InvalidArgument& error) {
    fail("{} (while region '{}', which is recomputed, ran again in backward)", error.what(),
         block.name);
  }
}

}  // namespace

// Records the region now and hands it the gradients of the outputs it had; the loop in backward()
// then runs what was recorded.
void Tape::replay(Entry& entry) {
  begin_region(*entry.block);
  const std::vector<Tensor> douts = take_grads(entry);
  if (douts.empty()) return;
  if (memory_.checks_saved()) entry.saved.check(compute_, entry.str());
  for (const Read& read : entry.read) {
    require(!read.buffer.expired(),
            "[region] expected '{}', which the function of {} read in forward, to live until it is "
            "recomputed, got a tensor that is gone: the function refers to it, and is to be handed "
            "it as an input, or to capture it by value",
            read.name, entry.block->name);
  }
  std::vector<Tensor> results;
  {
    const InScope scope(compute_, {entry.block->name, "recompute"});
    const std::string_view phase = std::exchange(forward_phase_, "recompute");
    results = run_again(*entry.block, entry.fn);
    forward_phase_ = phase;
  }
  count_down(std::exchange(used_, {}));  // by ops that did not record, after the last that did
  for (std::size_t i = 0; i < douts.size(); ++i) {
    const std::size_t index = entry.outs[i].index;
    require(index < results.size() && results[index].defined(),
            "[region] expected output {} again when {} is recomputed, got {} outputs", index,
            entry.block->name, results.size());
    require(entry.results.empty() || checksum_of(compute_, results[index]) == entry.results[i],
            "[region] expected output {} as it was when {} is recomputed, got other values: what "
            "its function refers to is gone or was written, or it does not do the same both times "
            "({})",
            index, entry.block->name, results[index].name());
    if (douts[i].defined()) pass_grad(results[index], douts[i]);
  }
}

void Tape::clear() {
  entries_.clear();
  used_.clear();
  grads_.clear();
  summed_.clear();
  column_sums_.clear();
  produced_.clear();
  produced_serials_.clear();
  deferred_ = {};
  inside_.clear();
  watched_.clear();
  pending_uses_.clear();
}

std::int64_t Tape::pending_uses(const Parameter& p) const {
  const auto it = pending_uses_.find(&p);
  return it == pending_uses_.end() ? 0 : it->second;
}

std::string Tape::Entry::str() const {
  return block == nullptr ? fmt::format("op '{}'", op) : fmt::format("region '{}'", block->name);
}

std::string Tape::describe_entries() const {
  if (entries_.empty()) return "no entries";
  return fmt::format("{} entries, the first of {}, the last of {}", entries_.size(),
                     entries_.front().str(), entries_.back().str());
}

}  // namespace tessera::engine
