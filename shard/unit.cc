#include "shard/unit.h"

#include <algorithm>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"

namespace tessera::shard {

using engine::Block;
using engine::Buffer;
using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::size_of;
using engine::Stream;
using engine::Tensor;

namespace {

// `t` as part of `slot`, to which its buffer is attached: the unit lets go of its own handle before
// what it launched has run.
Tensor in_slot(const Tensor& t, const SlotRing::Slot& slot) {
  return Tensor(slot.buffer, t.key().offset_nbytes, t.shape(), t.dtype());
}

}  // namespace

Unit::Unit(UnitContext& context, std::vector<Block*> blocks, bool is_root)
    : context_(context), blocks_(std::move(blocks)), is_root_(is_root) {
  name_ = blocks_.front()->name;
  if (blocks_.size() > 1) name_ += ".." + blocks_.back()->name;
  create_flats();
}

void Unit::create_flats() {
  const Placement& placement = context_.options.placement;
  const Precision& precision = context_.options.precision;
  const Mesh& mesh = context_.mesh;
  const auto part_of = [&](const Layout& layout, Place place) {
    return layout.part(mesh.part(place), mesh.num_parts(place));
  };
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
    // What nobody updates is held where it is gathered from.
    const Place owner = trainable ? placement.optimizer : placement.parameters;
    const Layout layout(numels, mesh.num_parts(owner));
    Flat flat{.parameters = std::move(parameters),
              .trainable = trainable,
              .layout = layout,
              .parameter_range = part_of(layout, placement.parameters),
              .gradient_range = part_of(layout, trainable ? placement.gradients : owner),
              .owned = part_of(layout, owner),
              .owner = owner,
              .segments = {}};
    flat.segments = flat.layout.segments(flat.owned);
    gathered_nbytes += flat.layout.flat_numel() * size_of(precision.param);
    if (trainable) {
      used_.resize(flat.parameters.size());
      gradient_nbytes = flat.layout.flat_numel() * size_of(precision.accumulate);
    }
    flats_.push_back(std::move(flat));
  }
  const bool is_cut = placement.parameters != Place::kWhole;
  gathered_ = Buffer::create_released(context_.memory, name_, is_cut ? gathered_nbytes : 0,
                                      Category::kGatheredParameter);
  gradient_ = Buffer::create_released(context_.memory, name_ + ".grad", gradient_nbytes,
                                      Category::kGradient);
  std::int64_t offset_nbytes = 0;
  for (Flat& flat : flats_) {
    stores_.push_back(std::make_unique<ParameterStore>(StoreContext{.name = name_,
                                                                    .mesh = mesh,
                                                                    .memory = context_.memory,
                                                                    .gather = context_.gather,
                                                                    .placement = placement,
                                                                    .dtype = precision.param,
                                                                    .keeps = !is_root_},
                                                       flat, gathered_, offset_nbytes));
    offset_nbytes += flat.layout.flat_numel() * size_of(precision.param);
    flat.master = stores_.back()->master();
    if (flat.trainable) {
      gradient_view_ = Tensor(gradient_, 0, {flat.layout.flat_numel()}, precision.accumulate);
    }
    bind(flat, stores_.back()->whole());
    initialise(flat);
  }
}

void Unit::bind(const Flat& flat, const Tensor& value) {
  for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
    Parameter& p = *flat.parameters[i];
    p.value = value.slice(flat.layout.offset(i), p.shape);
    p.grad = flat.trainable ? gradient_view_.slice(flat.layout.offset(i), p.shape) : Tensor();
    p.grad_written = false;
  }
}

void Unit::initialise(Flat& flat) const {
  std::vector<float> values;
  std::vector<std::int64_t> table;
  for (const Segment& s : flat.segments) {
    const Parameter& p = *flat.parameters[s.parameter];
    values.resize(static_cast<std::size_t>(s.numel));
    p.init.write(values.data(), s.parameter_begin, s.numel, p.name, context_.options.seed);
    copy_from_floats(flat.master.slice(s.shard_begin, {s.numel}), values);
    table.insert(table.end(), {s.shard_begin, s.numel, static_cast<std::int64_t>(s.parameter)});
  }
  if (!context_.memory.device().is_cuda()) return;
  flat.segment_table = Tensor::from<std::int64_t>(
      context_.memory, {static_cast<std::int64_t>(flat.segments.size()), 3}, table,
      name_ + ".segments", Category::kParameterShard);
}

void Unit::set_up(SlotRing* parameters, SlotRing* gradients, const Tensor& reduce_staging) {
  parameter_ring_ = parameters;
  gradient_ring_ = gradients;
  for (Flat& flat : flats_) {
    if (!flat.trainable) continue;
    const ReducerContext context{.name = name_,
                                 .parameters = flat.parameters,
                                 .layout = flat.layout,
                                 .range = flat.gradient_range,
                                 .place = context_.options.placement.gradients,
                                 .mesh = context_.mesh,
                                 .precision = context_.options.precision,
                                 .memory = context_.memory,
                                 .stream = context_.reduce,
                                 .staging = reduce_staging};
    reducer_ = context_.options.reducer ? context_.options.reducer(context) : make_reducer(context);
    flat.grad_sum =
        reducer_->sum().slice(flat.owned.begin - flat.gradient_range.begin, {flat.owned.numel});
  }
}

// Parameters
// ---------------------------------------------------------------------------------------

bool Unit::can_prefetch() const {
  return parameter_ring_ != nullptr && parameter_ring_->has_free(gathered_->nbytes());
}

void Unit::unshard(const Stream& compute, const char* why) {
  if (unsharded() || gathered_->nbytes() == 0) return;
  parameter_slot_ = &parameter_ring_->borrow(name_, gathered_->nbytes(), [this, compute] {
    if (in_use_) return false;
    reshard(compute);
    return true;
  });
  gathered_->attach(parameter_slot_->buffer);
  context_.gather.wait(parameter_slot_->last_use);
  for (const auto& store : stores_) store->unshard(why);
}

void Unit::acquire(const Stream& compute) {
  in_use_ = true;
  for (const auto& store : stores_) store->wait(compute);
}

void Unit::reshard(const Stream& compute, bool keep) {
  if (parameter_slot_ == nullptr) return;
  if (keep) {
    for (const auto& store : stores_) store->keep(compute, parameter_slot_->buffer);
  }
  engine::Event last_use = compute.record("last_use");
  if (context_.memory.poisons()) {
    context_.gather.wait(last_use);
    const Tensor whole(parameter_slot_->buffer, 0, {gathered_->nbytes()}, DType::kU8);
    engine::launch_fill(context_.gather, whole, engine::kPoison, "poison", name_);
    last_use = context_.gather.record("poisoned");
  }
  gathered_->release();
  parameter_ring_->give_back(*std::exchange(parameter_slot_, nullptr), std::move(last_use));
}

void Unit::renew(const Stream& stream) {
  reshard(stream);  // what was gathered ahead and not used is out of date
  for (const auto& store : stores_) store->renew(stream);
}

void Unit::gather_renewed() {
  for (const auto& store : stores_) store->gather_renewed();
}

// Gradients
// ----------------------------------------------------------------------------------------

void Unit::begin_gradient(const Stream& compute) {
  if (gradient_->nbytes() == 0 || gradient_->resident()) return;
  gradient_slot_ = &gradient_ring_->borrow(name_, gradient_->nbytes(), [] { return false; });
  gradient_->attach(gradient_slot_->buffer);
  compute.wait(gradient_slot_->last_use);
  for (const Flat& flat : flats_) {
    if (!flat.trainable) continue;
    if (context_.memory.poisons()) {
      engine::launch_fill(compute, in_slot(gradient_view_, *gradient_slot_), engine::kPoison,
                          "poison", name_);
    }
    for (Parameter* p : flat.parameters) p->grad_written = false;
  }
}

void Unit::reduce_gradient(const Stream& compute, bool is_last) {
  for (const Flat& flat : flats_) {
    if (!flat.trainable) continue;
    for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
      const Parameter* p = flat.parameters[i];
      if (p->grad_written) {
        used_[i] = 1;
        if (context_.check != nullptr)
          context_.check->look(compute, *p, in_slot(p->grad, *gradient_slot_));
        continue;
      }
      engine::launch_fill(compute, in_slot(p->grad, *gradient_slot_), 0, "fill_zero", p->name);
    }
  }
  reducer_->reduce(in_slot(gradient_view_, *gradient_slot_), compute.record("gradient_ready"),
                   is_last);
  reduced_in_step_ = true;
  give_gradient_back(context_.reduce.record("reduced"));
}

void Unit::give_gradient_back(engine::Event last_use) {
  gradient_->release();
  gradient_ring_->give_back(*std::exchange(gradient_slot_, nullptr), std::move(last_use));
}

// The step
// -----------------------------------------------------------------------------------------

void Unit::begin_step(const Stream& compute) {
  // Left over from a step that was given up.
  if (gradient_slot_ != nullptr) give_gradient_back(compute.record("left"));
  reduced_in_step_ = finished_in_step_ = false;
  std::ranges::fill(used_, std::uint8_t{0});
  if (reducer_ != nullptr) reducer_->begin_step();
}

void Unit::wait_for_sums(const Stream& stream) {
  if (!std::exchange(finished_in_step_, true)) reducer_->finish();
  stream.wait(context_.reduce.record("reduced"));
}

void Unit::finish_step(const Stream& compute) {
  if (reducer_ == nullptr) return;
  if (reduced_in_step_) return wait_for_sums(compute);
  engine::launch_fill(compute, reducer_->sum(), 0, "fill_zero", name_);
}

void Unit::set_unused(std::vector<std::uint8_t> unused) {
  const auto flat = std::ranges::find_if(flats_, &Flat::trainable);
  if (flat != flats_.end()) flat->unused = std::move(unused);
}

}  // namespace tessera::shard
