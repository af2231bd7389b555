#include "shard/unit.h"

#include <algorithm>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/norm_words.h"

namespace tessera::shard {

using engine::Block;
using engine::Buffer;
using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::size_of;
using engine::Stream;
using engine::Tensor;

namespace {

// `t` as part of `home`, to which its buffer is attached: the unit lets go of its own handle before
// what it launched has run.
Tensor in_home(const Tensor& t, const std::shared_ptr<Buffer>& home) {
  return Tensor(home, t.key().offset_nbytes, t.shape(), t.dtype());
}

}  // namespace

Unit::Unit(UnitContext& context, std::vector<Block*> blocks, bool is_root)
    : context_(context), blocks_(std::move(blocks)), is_root_(is_root) {
  name_ = blocks_.front()->name;
  if (blocks_.size() > 1) name_ += ".." + blocks_.back()->name;
  create_flats(Values::kInitial);
}

void Unit::create_flats(Values values) {
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
        const auto& ignores = context_.options.ignores;
        if (p->trainable != trainable || (ignores && ignores(*p))) continue;
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
    stores_.push_back(std::make_unique<ParameterStore>(
        StoreContext{.name = name_,
                     .mesh = mesh,
                     .memory = context_.memory,
                     .host_memory = context_.pinned,
                     .offload = context_.offload.get(),
                     .host_fraction = context_.options.offload.parameters,
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
    if (values == Values::kInitial) initialise(flat);
  }
  if (!context_.memory.device().is_cuda()) return;
  for (Flat& flat : flats_) {
    flat.tiles = make_tile_table(context_.memory, flat.segments, name_ + ".tiles");
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
  if (context_.memory.device().is_meta) return;
  const engine::Stream stream = engine::init_stream(context_.memory);
  const engine::Stream host = engine::Stream::inline_cpu("init");
  const auto seed = static_cast<std::uint64_t>(context_.options.seed);
  for (const Segment& s : flat.segments) {
    const Parameter& p = *flat.parameters[s.parameter];
    const SplitTensor values = flat.master.slice(s.shard_begin, s.numel);
    if (values.device().defined()) {
      launch_init(stream, p.init, values.device(), s.parameter_begin, p.name, seed);
    }
    if (values.has_host()) {
      launch_init(host, p.init, values.host(), s.parameter_begin + values.split(), p.name, seed);
    }
  }
  stream.synchronize();
}

std::int64_t Unit::sum_nbytes() const {
  return trainable() == nullptr ? 0 : trainable()->gradient_range.numel * size_of(DType::kF32);
}

void Unit::set_up(SlotRing* parameters, SlotRing* gradients, const Tensor& reduce_staging,
                  SumSlot* sum, std::int64_t first_parameter) {
  first_parameter_ = first_parameter;
  parameter_ring_ = parameters;
  gradient_ring_ = gradients;
  if (trainable() == nullptr) return;
  Flat& flat = flats_.front();
  const std::int64_t numel = flat.gradient_range.numel;
  sum_ = SplitTensor::empty(context_.memory, context_.pinned, numel,
                            context_.options.offload.gradients, DType::kF32, name_ + ".grad_sum",
                            Category::kGradient);
  sum_slot_ = sum_.has_host() ? sum : nullptr;
  flat.has_own_squares = sum_slot_ != nullptr && context_.norm_words.defined();
  const ReducerContext context{.name = name_,
                               .parameters = flat.parameters,
                               .layout = flat.layout,
                               .range = flat.gradient_range,
                               .place = context_.options.placement.gradients,
                               .mesh = context_.mesh,
                               .precision = context_.options.precision,
                               .memory = context_.memory,
                               .pinned = context_.pinned,
                               .stream = context_.reduce,
                               .sum = sum_slot_ == nullptr
                                          ? sum_.device()
                                          : Tensor(sum_slot_->buffer, 0, {numel}, DType::kF32),
                               .staging = reduce_staging,
                               .may_skip = context_.options.non_finite == NonFinite::kSkip};
  reducer_ = context_.options.reducer ? context_.options.reducer(context) : make_reducer(context);
  flat.grad_sum = sum_.slice(flat.owned.begin - flat.gradient_range.begin, flat.owned.numel);
}

void Unit::tear_down() {
  if (has_gradient()) give_gradient_back({});  // of a step that was given up
  parameter_ring_ = gradient_ring_ = nullptr;
  for (Flat& flat : flats_) flat.grad_sum = {};
  reducer_.reset();
  sum_ = {};
  sum_slot_ = nullptr;
  sum_on_device_ = sum_stored_ = reduced_ = {};
  updated_.clear();
}

bool Unit::is_cut_otherwise() const {
  return std::ranges::any_of(flats_, [](const Flat& flat) {
    return std::ranges::any_of(flat.parameters,
                               [&](const Parameter* p) { return p->trainable != flat.trainable; });
  });
}

void Unit::recut() {
  flats_.clear();
  stores_.clear();
  used_.clear();
  gradient_view_ = {};
  create_flats(Values::kNone);
}

// Parameters
// ---------------------------------------------------------------------------------------

bool Unit::can_prefetch() const {
  return !updated_in_step_ && parameter_ring_ != nullptr &&
         parameter_ring_->has_free(gathered_->nbytes());
}

void Unit::unshard(const Stream& compute, const char* why) {
  if (unsharded() || gathered_->nbytes() == 0) return;
  parameter_slot_ = &parameter_ring_->borrow(name_, gathered_->nbytes(), [this, compute] {
    if (in_use() || is_kept_) return false;
    reshard(compute);
    return true;
  });
  use_ = Use::kNever;
  gathered_->attach(parameter_slot_->buffer);
  context_.gather.wait(parameter_slot_->last_use);
  if (context_.offload != nullptr) context_.offload->fetch().wait(parameter_slot_->last_use);
  for (const auto& store : stores_) store->unshard(why);
}

void Unit::acquire(const Stream& compute, const char* why) {
  require(!updated_in_step_,
          "[fsdp] expected finish_step() before a use of parameters that a step in backward has "
          "updated, got a {} of '{}': evaluate before the last backward or after finish_step(), "
          "and give Fsdp the block of a recomputed region that uses them inside no_grad",
          why, name_);
  use_ = Use::kNow;
  wait_for_gather(compute);
  StepListener* listener = context_.options.step_listener;
  if (listener != nullptr) listener->on_gathered(*this, why);
}

void Unit::wait_for_gather(const Stream& stream) const {
  for (const auto& store : stores_) store->wait(stream);
}

void Unit::reshard(const Stream& compute, bool keep) {
  if (parameter_slot_ == nullptr) return;
  if (keep) {
    for (const auto& store : stores_) store->keep(compute, parameter_slot_->buffer);
  }
  engine::Event last_use = compute.record("last_use");
  if (use_ == Use::kNever) {  // nobody has waited for the gather
    context_.gather.wait(last_use);
    last_use = context_.gather.record("gathered");
  }
  if (context_.memory.poisons()) {
    context_.gather.wait(last_use);
    const Tensor whole(parameter_slot_->buffer, 0, {gathered_->nbytes()}, DType::kU8);
    engine::launch_fill(context_.gather, whole, engine::kPoison, "poison", name_);
    last_use = context_.gather.record("poisoned");
  }
  gathered_->release();
  parameter_ring_->give_back(*std::exchange(parameter_slot_, nullptr), std::move(last_use));
}

void Unit::renew(const Stream& stream, const std::vector<WrittenOnHost>& on_host) {
  is_stale_ = false;
  reshard(stream);  // what was gathered ahead and not used is out of date
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    stores_[i]->renew(stream, flats_[i].trainable ? on_host : std::vector<WrittenOnHost>());
  }
  if (context_.offload == nullptr) return;
  updated_.clear();
  for (const WrittenOnHost& written : on_host) updated_.push_back(written.when);
  updated_.push_back(stream.record("updated"));
}

void Unit::renew_all(const Stream& stream) {
  is_stale_ = false;
  reshard(stream);
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    const SplitTensor& master = flats_[i].master;
    std::vector<WrittenOnHost> on_host;
    if (master.has_host()) on_host.push_back({{master.split(), master.host().numel()}, {}});
    stores_[i]->renew(stream, on_host);
  }
}

void Unit::renew_stale(const Stream& stream) {
  if (!is_stale_) return;
  // Where nothing is gathered nobody else would see that only some ranks were written.
  context_.mesh.world().declare(name_ + " was written");
  renew_all(stream);
  gather_renewed();
}

void Unit::gather_renewed() {
  require(parameter_slot_ == nullptr,
          "[fsdp] expected no use of '{}' between its update and the gather of the others', got "
          "one",
          name_);
  for (const auto& store : stores_) store->gather_renewed();
}

// Gradients
// ----------------------------------------------------------------------------------------

// A rank that is alone need not copy its gradient to the sum.
bool Unit::sum_takes_gradient() const {
  return sum_slot_ == nullptr && reducer_ != nullptr && reducer_->takes_sum() &&
         gradient_view_.shape() == sum_.device().shape() && gradient_view_.dtype() == DType::kF32;
}

void Unit::begin_gradient(const Stream& compute) {
  if (gradient_->nbytes() == 0 || gradient_->resident()) return;
  if (sum_state_ == Sum::kEmpty && sum_takes_gradient()) {
    // Compute comes after what read the sum of the step before, and what a step that was given up
    // added to it is waited for.
    gradient_home_ = sum_.device().buffer();
    compute.wait(reduced_);
  } else {
    gradient_slot_ = &gradient_ring_->borrow(name_, gradient_->nbytes(), [] { return false; });
    gradient_home_ = gradient_slot_->buffer;
    compute.wait(gradient_slot_->last_use);
  }
  gradient_->attach(gradient_home_);
  if (context_.memory.poisons()) {
    engine::launch_fill(compute, in_home(gradient_view_, gradient_home_), engine::kPoison, "poison",
                        name_);
  }
  for (Parameter* p : trainable()->parameters) p->grad_written = false;
}

void Unit::reduce_gradient(const Stream& compute, bool is_last) {
  const std::vector<Parameter*>& parameters = trainable()->parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter* p = parameters[i];
    if (p->grad_written) {
      used_[i] = 1;
      if (context_.check != nullptr)
        context_.check->look(compute, *p, in_home(p->grad, gradient_home_));
      continue;
    }
    engine::launch_fill(compute, in_home(p->grad, gradient_home_), 0, "fill_zero", p->name);
  }
  StepListener* listener = context_.options.step_listener;
  if (listener != nullptr) listener->on_gradient(*this);
  if (sum_slot_ != nullptr) {
    fetch_sum(sum_state_ != Sum::kEmpty);
  } else {
    wait_for_updates(context_.reduce);
  }
  reducer_->reduce(in_home(gradient_view_, gradient_home_), compute.record("gradient_ready"),
                   is_last);
  sum_state_ = Sum::kBegun;
  reduced_ = context_.reduce.record("reduced");
  give_gradient_back(reduced_);
  if (sum_slot_ != nullptr) store_sum(is_last && !reducer_->has_more());
}

// Updates, which may be made while anything else runs, read sums.
void Unit::wait_for_updates(const Stream& stream) {
  for (const engine::Event& event : updated_) stream.wait(event);
  updated_.clear();
}

// Makes the slot of the sum ready for a reduction.
void Unit::fetch_sum(bool has_sum) {
  if (!has_sum) return context_.reduce.wait(sum_slot_->last_use);
  const Stream& up = context_.offload->sums_up();
  up.wait(sum_slot_->last_use);
  up.wait(sum_stored_);
  copy(reducer_->sum(), sum_, up, "fetch sum");
  context_.reduce.wait(up.record("sum fetched"));
}

// Of the sum in its slot.
void Unit::add_squares_of_sum() {
  has_squares_ = true;
  const Flat& flat = flats_.front();
  if (!flat.has_own_squares) return;
  const Tensor sum =
      reducer_->sum().slice(flat.owned.begin - flat.gradient_range.begin, {flat.owned.numel});
  add_squares(context_.reduce, context_.norm_words, flat, sum, first_parameter_);
}

void Unit::store_sum(bool is_final) {
  if (is_final) add_squares_of_sum();
  const Stream& down = context_.offload->sums_down();
  down.wait(context_.reduce.record("reduced"));
  wait_for_updates(down);
  if (sum_.device().defined()) {
    engine::copy(sum_.device(), reducer_->sum().slice(0, sum_.device().shape()), down, "store sum");
    sum_on_device_ = down.record("sum on device");
  }
  engine::copy(sum_.host(), reducer_->sum().slice(sum_.split(), sum_.host().shape()), down,
               "store sum");
  sum_stored_ = sum_slot_->last_use = down.record("sum stored");
}

void Unit::give_gradient_back(engine::Event last_use) {
  gradient_->release();
  gradient_home_ = nullptr;
  if (gradient_slot_ == nullptr) return;
  gradient_ring_->give_back(*std::exchange(gradient_slot_, nullptr), std::move(last_use));
}

// The step
// -----------------------------------------------------------------------------------------

void Unit::begin_step(const Stream& compute) {
  // Left over from a step that was given up.
  if (has_gradient()) give_gradient_back(compute.record("left"));
  sum_state_ = Sum::kEmpty;
  updated_in_step_ = has_squares_ = false;
  std::ranges::fill(used_, std::uint8_t{0});
  if (reducer_ != nullptr) reducer_->begin_step();
}

void Unit::wait_for_sums(const Stream& stream) {
  if (std::exchange(sum_state_, Sum::kWhole) != Sum::kWhole && reducer_->has_more()) {
    if (sum_slot_ != nullptr) fetch_sum(true);
    reducer_->finish();
    if (sum_slot_ != nullptr) store_sum(true);
  }
  if (sum_slot_ != nullptr && !has_squares_) {  // the last micro-step did not reduce it
    fetch_sum(true);
    add_squares_of_sum();
    sum_slot_->last_use = context_.reduce.record("squares");
  }
  stream.wait(context_.reduce.record("reduced"));
  if (sum_slot_ != nullptr) stream.wait(sum_on_device_);
}

void Unit::finish_step(const Stream& compute) {
  updated_in_step_ = false;
  if (reducer_ == nullptr) return;
  if (sum_state_ != Sum::kEmpty) return wait_for_sums(compute);
  if (sum_slot_ == nullptr) {
    wait_for_updates(compute);
    compute.wait(context_.reduce.record("left"));  // what a step that was given up may still add
    engine::launch_fill(compute, sum_.device(), 0, "fill_zero", name_);
    return;
  }
  fetch_sum(false);
  engine::launch_fill(context_.reduce, reducer_->sum(), 0, "fill_zero", name_);
  store_sum(true);
  compute.wait(context_.reduce.record("reduced"));
  compute.wait(sum_on_device_);
}

void Unit::set_unused(std::vector<std::uint8_t> unused) {
  if (trainable() != nullptr) flats_.front().unused = std::move(unused);
}

}  // namespace tessera::shard
