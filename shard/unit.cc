#include "shard/unit.h"

#include <algorithm>
#include <utility>

#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/schedule.h"

namespace tessera::shard {

using engine::Block;
using engine::Buffer;
using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::size_of;
using engine::Stream;
using engine::Tape;
using engine::Tensor;

namespace {

// `t` as part of `slot`, to which its buffer is attached: the unit lets go of its own handle before
// what it launched has run.
Tensor in_slot(const Tensor& t, const SlotRing::Slot& slot) {
  return Tensor(slot.buffer, t.key().offset_nbytes, t.shape(), t.dtype());
}

}  // namespace

// [Note: visits]
// A unit may pack several neighbouring blocks, and a block may run several times before a backward.
// A visit is one pass over consecutive blocks of the unit: gathered when the first block starts,
// given back when the last one ends (or another unit starts). Backward meets the visits in reverse
// order: a visit's backward starts with its last block and ends with its first, and then its
// gradient is final and reduced. So packing and repeated forwards need no special case.

Unit::Unit(UnitContext& context, std::vector<Block*> blocks, bool is_root)
    : context_(context), blocks_(std::move(blocks)), is_root_(is_root) {
  name_ = blocks_.front()->name;
  if (blocks_.size() > 1) name_ += ".." + blocks_.back()->name;
  for (Block* block : blocks_) {
    require(block->hooks == nullptr, "[unit] expected a block that is not wrapped yet ({})",
            block->name);
  }
  create_flats();
  for (Block* block : blocks_) block->hooks = this;
}

Unit::~Unit() {
  for (Block* block : blocks_) block->hooks = nullptr;
}

void Unit::create_flats() {
  const bool shards = context_.options.placement.parameters == Place::kShard;
  const int num_shards = shards ? context_.group->size() : 1;
  const int shard_index = shards ? context_.group->rank() : 0;
  const Precision& precision = context_.options.precision;
  std::int64_t gathered_nbytes = 0, gradient_nbytes = 0;
  for (const bool trainable : {true, false}) {
    std::vector<Parameter*> parameters;
    std::vector<std::int64_t> numels;
    for (const Block* block : blocks_) {
      for (Parameter* p : block->parameters) {
        if (p->trainable != trainable) continue;
        parameters.push_back(p);
        numels.push_back(p->shape.numel());
      }
    }
    if (parameters.empty()) continue;
    Flat flat{.parameters = std::move(parameters),
              .layout = Layout(numels, num_shards),
              .segments = {},
              .trainable = trainable,
              .gathered_offset_nbytes = gathered_nbytes,
              .master = {},
              .wire = {},
              .gathered = {},
              .grad = {},
              .grad_sum = {},
              .segment_table = {}};
    flat.segments = flat.layout.segments(shard_index);
    gathered_nbytes += flat.layout.flat_numel() * size_of(precision.param);
    if (trainable) gradient_nbytes = flat.layout.flat_numel() * size_of(precision.accumulate);
    flats_.push_back(std::move(flat));
  }
  gathered_ = Buffer::create_released(context_.memory, name_, shards ? gathered_nbytes : 0,
                                      Category::kGatheredParameter);
  gradient_ = Buffer::create_released(context_.memory, name_ + ".grad", gradient_nbytes,
                                      Category::kGradient);
  for (Flat& flat : flats_) {
    const engine::Shape shard{flat.layout.shard_numel()}, whole{flat.layout.flat_numel()};
    flat.master = Tensor::empty(context_.memory, shard, DType::kF32, name_ + ".master",
                                Category::kParameterShard);
    flat.wire = precision.param == DType::kF32
                    ? flat.master
                    : Tensor::empty(context_.memory, shard, precision.param, name_ + ".wire",
                                    Category::kParameterShard);
    flat.gathered =
        shards ? Tensor(gathered_, flat.gathered_offset_nbytes, whole, precision.param) : flat.wire;
    if (flat.trainable) {
      flat.grad = Tensor(gradient_, 0, whole, precision.accumulate);
      flat.grad_sum = Tensor::empty(context_.memory, shard, DType::kF32, name_ + ".grad_sum",
                                    Category::kGradient);
    }
    for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
      Parameter& p = *flat.parameters[i];
      p.value = flat.gathered.slice(flat.layout.offset(i), p.shape);
      p.grad = flat.trainable ? flat.grad.slice(flat.layout.offset(i), p.shape) : Tensor();
      p.grad_written = false;
    }
    std::vector<float> values;
    std::vector<std::int64_t> table;
    for (const Segment& s : flat.segments) {
      const Parameter& p = *flat.parameters[s.parameter];
      values.resize(static_cast<std::size_t>(s.numel));
      p.init.write(values.data(), s.parameter_begin, s.numel, p.name, context_.options.seed);
      flat.master.slice(s.shard_begin, {s.numel}).copy_from_host(values.data(), s.numel);
      table.insert(table.end(), {s.shard_begin, s.numel, static_cast<std::int64_t>(s.parameter),
                                 p.shape.rank()});
    }
    if (context_.memory.device().is_cuda()) {
      flat.segment_table = Tensor::from<std::int64_t>(
          context_.memory, {static_cast<std::int64_t>(flat.segments.size()), 4}, table,
          name_ + ".segments", Category::kParameterShard);
    }
  }
}

void Unit::set_rings(SlotRing* parameters, SlotRing* gradients) {
  parameter_ring_ = parameters;
  gradient_ring_ = gradients;
}

std::size_t Unit::index_of(const Block& block) const {
  const auto it = std::find(blocks_.begin(), blocks_.end(), &block);
  require(it != blocks_.end(), "[unit] expected a block of '{}', got '{}'", name_, block.name);
  return static_cast<std::size_t>(it - blocks_.begin());
}

// The four calls
// -----------------------------------------------------------------------------------

void Unit::before_forward(const Block& block, const Tape& tape) {
  const Stream& compute = tape.stream();
  const bool will_backward = tape.recording();
  const std::size_t index = index_of(block);
  if (visit_ && index > visit_->last && visit_->will_backward == will_backward) {
    visit_->last = index;  // the next block of a packed unit
  } else {
    close_visit(compute);
    context_.schedule->enter_forward(*this, compute);
    visit_ = Visit{index, index, will_backward};
  }
  ++num_open_blocks_;
}

void Unit::after_forward(const Block& block, const Tape& tape) {
  --num_open_blocks_;
  if (index_of(block) + 1 == blocks_.size()) close_visit(tape.stream());
}

void Unit::close_visit(const Stream& compute) {
  if (!visit_ || num_open_blocks_ > 0) return;
  const Visit visit = *std::exchange(visit_, std::nullopt);
  if (visit.will_backward) visits_.push_back(visit);
  in_use_ = false;
  const bool backward_is_next = context_.schedule->leave_forward(*this, visit.will_backward);
  const bool reshards = context_.options.placement.reshard_after_forward;
  const bool keep = backward_is_next || (!reshards && !visits_.empty());
  if (!keep) reshard(compute);
}

void Unit::before_backward(const Block& block, const Tape& tape) {
  const Stream& compute = tape.stream();
  close_visit(compute);
  if (backward_visit_) return;
  require(!visits_.empty(), "[unit] expected a recorded forward before backward ({}, block {})",
          name_, block.name);
  context_.schedule->enter_backward(*this, compute);
  backward_visit_ = visits_.back();
  visits_.pop_back();
  begin_gradient(compute);
}

void Unit::after_backward(const Block& block, const Tape& tape) {
  const Stream& compute = tape.stream();
  if (!backward_visit_ || index_of(block) != backward_visit_->first) return;
  backward_visit_.reset();
  in_use_ = false;
  if (context_.options.communicate == Communicate::kEveryMicroStep || context_.last_micro_step) {
    reduce_gradient(compute);
  }
  if (visits_.empty() || context_.options.placement.reshard_after_forward) reshard(compute);
}

// Parameters
// ---------------------------------------------------------------------------------------

bool Unit::can_prefetch() const {
  return parameter_ring_ != nullptr && parameter_ring_->has_free();
}

void Unit::unshard(const Stream& compute, const char* why) {
  if (unsharded() || gathered_->nbytes() == 0) return;
  const Stream& comm = context_.comm;
  parameter_slot_ = &parameter_ring_->borrow(name_, [this, compute] {
    if (in_use_) return false;
    reshard(compute);
    return true;
  });
  gathered_->attach(parameter_slot_->buffer);
  comm.wait(parameter_slot_->last_use);
  comm.wait(context_.updated);
  for (Flat& flat : flats_) {
    context_.group->all_gather(flat.wire, flat.gathered, comm, name_ + " " + why);
  }
  gathered_event_ = comm.record("gathered");
}

void Unit::wait_for_unshard(const Stream& compute) {
  in_use_ = true;
  compute.wait(gathered_event_);
}

void Unit::reshard(const Stream& compute) {
  if (parameter_slot_ == nullptr) return;
  engine::Event last_use = compute.record("last_use");
  if (context_.memory.poisons()) {
    context_.comm.wait(last_use);
    const Tensor whole(parameter_slot_->buffer, 0, {gathered_->nbytes()}, DType::kU8);
    engine::launch_fill(context_.comm, whole, engine::kPoison, "poison", name_);
    last_use = context_.comm.record("poisoned");
  }
  gathered_->release();
  parameter_ring_->give_back(*std::exchange(parameter_slot_, nullptr), std::move(last_use));
}

// Gradients
// ----------------------------------------------------------------------------------------

void Unit::begin_gradient(const Stream& compute) {
  if (gradient_->nbytes() == 0 || gradient_->resident()) return;
  gradient_slot_ = &gradient_ring_->borrow(name_, [] { return false; });
  gradient_->attach(gradient_slot_->buffer);
  compute.wait(gradient_slot_->last_use);
  for (Flat& flat : flats_) {
    if (!flat.trainable) continue;
    if (context_.memory.poisons()) {
      engine::launch_fill(compute, in_slot(flat.grad, *gradient_slot_), engine::kPoison, "poison",
                          name_);
    }
    for (Parameter* p : flat.parameters) p->grad_written = false;
  }
}

void Unit::reduce_gradient(const Stream& compute) {
  if (gradient_slot_ == nullptr) return;
  for (Flat& flat : flats_) {
    if (!flat.trainable) continue;
    for (const Parameter* p : flat.parameters) {
      if (p->grad_written) continue;
      engine::launch_fill(compute, in_slot(p->grad, *gradient_slot_), 0, "fill_zero", p->name);
    }
    context_.comm.wait(compute.record("gradient_ready"));
    reduce(flat);
  }
  reduced_ = context_.comm.record("reduced");
  reduced_in_step_ = true;
  gradient_->release();
  gradient_ring_->give_back(*std::exchange(gradient_slot_, nullptr), reduced_);
}

void Unit::reduce(Flat& flat) {
  const Stream& comm = context_.comm;
  Tensor in = flat.grad;
  if (in.dtype() != context_.options.precision.reduce) {
    in = context_.reduce_staging.slice(0, flat.grad.shape());
    engine::launch_assign_or_add(comm, in, in_slot(flat.grad, *gradient_slot_), false, "cast",
                                 name_);
  }
  const auto accumulate = reduced_in_step_ ? comm::Accumulate::kYes : comm::Accumulate::kNo;
  const std::string label = name_ + " gradient";
  if (context_.options.placement.gradients == Place::kShard) {
    context_.group->reduce_scatter(in, flat.grad_sum, accumulate, comm, label);
  } else {
    context_.group->all_reduce(in, flat.grad_sum, accumulate, comm, label);
  }
}

// The step
// -----------------------------------------------------------------------------------------

void Unit::begin_step() {
  reduced_in_step_ = false;
  if (gradient_slot_ != nullptr) {  // left over from a step that ended in an error
    gradient_->release();
    gradient_ring_->give_back(*std::exchange(gradient_slot_, nullptr), {});
  }
}

void Unit::begin_micro_step(const Stream& compute) {
  visit_.reset();
  visits_.clear();
  backward_visit_.reset();
  num_open_blocks_ = 0;
  in_use_ = false;
  reshard(compute);  // left over if a forward had no backward
}

void Unit::finish_step(const Stream& compute) {
  require(visits_.empty(),
          "[unit] expected a backward for every recorded forward of the step, got {} without ({})",
          visits_.size(), name_);
  if (gradient_slot_ != nullptr) reduce_gradient(compute);
  if (reduced_in_step_) {
    compute.wait(reduced_);
    return;
  }
  for (Flat& flat : flats_) {
    if (flat.trainable) engine::launch_fill(compute, flat.grad_sum, 0, "fill_zero", name_);
  }
}

void Unit::refresh(const Stream& compute) {
  close_visit(compute);
  reshard(compute);  // what was gathered ahead and not used is out of date
  for (Flat& flat : flats_) {
    if (flat.wire.dtype() == DType::kF32) continue;
    engine::launch_assign_or_add(compute, flat.wire, flat.master, false, "cast", name_);
  }
}

}  // namespace tessera::shard
