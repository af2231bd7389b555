#include "engine/tape.h"

#include "engine/elementwise.h"

namespace tessera::engine {

// [Note: gradient accumulation]
// Gradients of activations live in grads_, keyed by the identity of the elements. The first writer
// assigns, later ones add: grad_target() says which, so no gradient is ever zero-filled first. An
// op that passes a gradient through hands over the tensor itself (pass_grad); a tensor shared in
// that way is copied before somebody adds to it. The entry that produced `x` takes the gradient of
// `x` out of the map, so memory falls as backward proceeds.
//
// Gradients of parameters are views preassigned by the owner of the parameter. The first write of a
// pass assigns as well, and is remembered in Parameter::grad_written; the owner zero-fills what was
// not written when it needs the whole flat buffer.

Tape::Tape(Memory memory, Stream compute)
    : memory_(std::move(memory)), compute_(std::move(compute)) {
  require(memory_.device() == compute_.device() && (!memory_.home() || *memory_.home() == compute_),
          "[tape] expected memory of the stream it works on, got {} of another than '{}' of {}",
          to_string(memory_.device()), compute_.name(), to_string(compute_.device()));
}

Tensor Tape::empty(const Shape& shape, DType dtype, std::string_view name) const {
  return Tensor::empty(memory_, shape, dtype, name, Category::kActivation);
}

void Tape::push(Entry entry) {
  entry.used = std::exchange(used_, {});
  entries_.push_back(std::move(entry));
}

void Tape::record(std::string_view op, const Tensor& out, Backward backward) {
  if (!recording()) return;
  record(op, std::vector<Tensor>{out},
         [backward = std::move(backward)](const std::vector<Tensor>& douts) {
           backward(douts.front());
         });
}

void Tape::record(std::string_view op, const std::vector<Tensor>& outs,
                  std::function<void(const std::vector<Tensor>&)> backward) {
  if (!recording()) return;
  Entry entry{.op = op, .backward = std::move(backward)};
  for (const Tensor& out : outs) entry.outs.push_back(produce(out));
  push(std::move(entry));
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
  if (pass_ != Pass::kUnrecorded) {
    used_.push_back(&p);
    ++pending_uses_[&p];
  }
  return p.value;
}

bool Tape::needs_grad(const Tensor& x) const { return recording() && wants_grad(x); }

bool Tape::wants_grad(const Tensor& x) const {
  const TensorKey key = x.key();
  if (produced_.contains(key) || watched_.contains(key)) return true;
  require(key.memory != memory_.id() || !produced_serials_.contains(key.serial),
          "[tape] expected a whole activation, got a slice of one: its gradient would be lost ({})",
          x.name());
  return false;
}

GradTarget Tape::grad_target(const Tensor& x) {
  if (!wants_grad(x)) return {};
  Tensor& grad = grads_[x.key()];
  if (!grad.defined()) {
    grad = Tensor::empty(memory_, x.shape(), x.dtype(), x.name());
    return {grad, false};
  }
  if (grad.buffer().use_count() > 1) {  // shared by pass_grad
    const Tensor own = Tensor::empty(memory_, x.shape(), x.dtype(), x.name());
    launch_assign_or_add(compute_, own, grad, false, "tape.copy_grad");
    grad = own;
  }
  return {grad.reshape(x.shape()), true};
}

GradTarget Tape::grad_target(Parameter& p) {
  if (!p.trainable) return {};
  require(p.grad.defined(), "[tape] expected a gradient view for a trainable parameter ({})",
          p.name);
  require(p.grad.shape() == p.shape, "[tape] expected a gradient of shape {}, got {} ({})",
          p.shape.str(), p.grad.shape().str(), p.name);
  return {p.grad, std::exchange(p.grad_written, true)};
}

void Tape::pass_grad(const Tensor& x, const Tensor& dx) {
  require(dx.numel() == x.numel() && dx.dtype() == x.dtype(),
          "[tape] expected a gradient {} {}, got {} {} ({})", name_of(x.dtype()), x.shape().str(),
          name_of(dx.dtype()), dx.shape().str(), x.name());
  if (!wants_grad(x)) return;
  Tensor& grad = grads_[x.key()];
  if (!grad.defined()) {
    grad = dx;
  } else {
    launch_assign_or_add(compute_, grad_target(x).dst, dx, true, "tape.add_grad");
  }
}

Tensor Tape::region(const Block& block, const std::function<Tensor()>& fn, RegionOptions options) {
  if (block.hooks != nullptr) block.hooks->before_forward(block, *this);
  Tensor out;
  if (recording() && options.recompute) {
    {
      const PassScope scope(*this, Pass::kDeferred);
      out = fn();
    }
    push({.kind = Entry::Kind::kReplay, .outs = {produce(out)}, .block = &block, .fn = fn});
  } else {
    if (recording()) entries_.push_back({.kind = Entry::Kind::kRegionBegin, .block = &block});
    out = fn();
    if (recording()) entries_.push_back({.kind = Entry::Kind::kRegionEnd, .block = &block});
  }
  if (block.hooks != nullptr) block.hooks->after_forward(block, *this);
  return out;
}

void Tape::watch(const Tensor& x) { watched_.insert(x.key()); }

Tensor Tape::grad(const Tensor& x) const {
  const auto it = grads_.find(x.key());
  return it == grads_.end() ? Tensor() : it->second.reshape(x.shape());
}

void Tape::backward(const std::vector<Tensor>& losses, float seed) {
  require(recording(), "[backward] expected a tape that records, got a call inside no_grad");
  for (const Tensor& loss : losses) {
    require(loss.numel() == 1, "[backward] expected a loss of one element, got {} ({})",
            loss.shape().str(), loss.name());
    require(produced_.contains(loss.key()),
            "[backward] expected a loss recorded on this tape and not yet run backward ({})",
            loss.name());
  }
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
    }
  } catch (...) {
    clear();
    throw;
  }
  std::erase_if(grads_, [this](const auto& item) { return !watched_.contains(item.first); });
  produced_.clear();
  produced_serials_.clear();
}

void Tape::count_down(const std::vector<Parameter*>& used) {
  for (const Parameter* p : used) --pending_uses_[p];
}

void Tape::run(Entry& entry) {
  RegionHooks* hooks = entry.block == nullptr ? nullptr : entry.block->hooks;
  switch (entry.kind) {
    case Entry::Kind::kOp:
      run_op(entry);
      break;
    case Entry::Kind::kRegionEnd:
      if (hooks != nullptr) hooks->before_backward(*entry.block, *this);
      break;
    case Entry::Kind::kRegionBegin:
      if (hooks != nullptr) hooks->after_backward(*entry.block, *this);
      break;
    case Entry::Kind::kReplay:
      if (hooks != nullptr) hooks->before_backward(*entry.block, *this);
      replay(entry);
      break;
  }
}

void Tape::run_op(Entry& entry) {
  std::vector<Tensor> douts(entry.outs.size());
  bool reached = false;
  for (std::size_t i = 0; i < douts.size(); ++i) {
    douts[i] = take_grad(entry.outs[i]);
    reached = reached || douts[i].defined();
  }
  if (reached) entry.backward(douts);
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

// Records the region now and hands it the gradient of the output it had; the loop in backward()
// then runs what was recorded.
void Tape::replay(Entry& entry) {
  entries_.push_back({.kind = Entry::Kind::kRegionBegin, .block = entry.block});
  const Tensor dout = take_grad(entry.outs.front());
  if (dout.defined()) pass_grad(entry.fn(), dout);
}

void Tape::clear() {
  entries_.clear();
  used_.clear();
  grads_.clear();
  produced_.clear();
  produced_serials_.clear();
  watched_.clear();
  pending_uses_.clear();
}

std::int64_t Tape::pending_uses(const Parameter& p) const {
  const auto it = pending_uses_.find(&p);
  return it == pending_uses_.end() ? 0 : it->second;
}

}  // namespace tessera::engine
