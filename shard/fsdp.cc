#include "shard/fsdp.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"
#include "shard/plan.h"

namespace tessera::shard {

using engine::Block;
using engine::Category;
using engine::DType;
using engine::Parameter;
using engine::require;
using engine::size_of;
using engine::Tensor;

namespace {

void check(const FsdpOptions& options) {
  const Placement& p = options.placement;
  require(options.prefetch >= 0, "[fsdp] expected prefetch of at least 0, got {}",
          options.prefetch);
  require(options.unit_min_numel >= 0, "[fsdp] expected unit_min_numel of at least 0, got {}",
          options.unit_min_numel);
  require(p.parameters == p.gradients && p.gradients == p.optimizer,
          "[fsdp] expected parameters, gradients and optimizer placed alike, got {}", to_string(p));
  require(p.parameters == Place::kShard || !p.reshard_after_forward,
          "[fsdp] expected no reshard_after_forward for replicated parameters, got {}",
          to_string(p));
  for (const DType dtype :
       {options.precision.param, options.precision.reduce, options.precision.accumulate}) {
    require(dtype == DType::kF32 || dtype == DType::kBF16, "[fsdp] expected f32 or bf16, got {}",
            name_of(dtype));
  }
}

void check_unique(const std::vector<Block*>& blocks, const Block* root) {
  std::map<const Parameter*, const Block*> owners;
  std::set<std::string> names;
  auto visit = [&](const Block& block) {
    for (const Parameter* p : block.parameters) {
      const auto [it, is_new] = owners.emplace(p, &block);
      require(is_new,
              "[fsdp] expected each parameter in one block, got '{}' in '{}' and '{}': put what "
              "blocks share into the root",
              p->name, it->second->name, block.name);
      require(names.insert(p->name).second, "[fsdp] expected unique parameter names, got two '{}'",
              p->name);
    }
  };
  for (const Block* block : blocks) visit(*block);
  if (root != nullptr) visit(*root);
}

// What SquareSum can sum exactly; better known now than after the first backward.
void check_numel(const std::vector<std::unique_ptr<Unit>>& units) {
  std::int64_t numel = 0;
  for (const auto& unit : units) {
    for (const Flat& flat : unit->flats()) numel += flat.trainable ? flat.layout.value_numel() : 0;
  }
  require(numel < (std::int64_t{1} << 32),
          "[fsdp] expected fewer than 2^32 trainable parameters, got {}", numel);
}

}  // namespace

Fsdp::Fsdp(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& compute,
           const std::vector<Block*>& blocks, Block* root, FsdpOptions options)
    : group_(group),
      compute_(compute),
      schedule_(options.prefetch),
      context_{.group = &group,
               .memory = memory,
               .pinned = engine::Memory::pinned(compute),
               .comm = compute.sibling(
                   "comm", {.listener = options.listener, .delay_seed = options.delay_seed}),
               .options = options,
               .schedule = &schedule_},
      num_exceptions_(std::uncaught_exceptions()) {
  check(options);
  require(memory.device() == compute.device() && (!memory.home() || *memory.home() == compute),
          "[fsdp] expected memory of stream '{}' on {}, got memory of {}{}", compute.name(),
          to_string(compute.device()), to_string(memory.device()),
          memory.home() ? " that belongs to stream '" + memory.home()->name() + "'" : "");
  check_unique(blocks, root);
  create_units(blocks, root);
  check_numel(units_);
  plan_ = describe(options, group.size(), units_);
  agree(group, memory, context_.comm, plan_);
  create_rings();
  parameters_changed();
}

Fsdp::~Fsdp() {
  if (std::uncaught_exceptions() > num_exceptions_) {
    group_.abort("another error ended the training loop");
  }
  // Collectives read slots, which die before the stream does, and a GPU may still write what the
  // host was to read. Whoever waited for work that failed has been told.
  for (const engine::Stream* stream : {&context_.comm, &compute_}) {
    stream->synchronize_quietly();
  }
}

void Fsdp::create_units(const std::vector<Block*>& blocks, Block* root) {
  std::vector<Block*> packed;
  std::int64_t numel = 0;
  std::vector<Unit*> order;
  for (Block* block : blocks) {
    packed.push_back(block);
    for (const Parameter* p : block->parameters) numel += p->shape.numel();
    if (numel < context_.options.unit_min_numel && block != blocks.back()) continue;
    units_.push_back(std::make_unique<Unit>(context_, std::exchange(packed, {}), false));
    order.push_back(units_.back().get());
    numel = 0;
  }
  schedule_.declare(std::move(order));
  if (root != nullptr) {
    units_.push_back(std::make_unique<Unit>(context_, std::vector<Block*>{root}, true));
  }
}

// Shared rings of prefetch + 1 slots; a ring of one slot for the root, whose region encloses the
// others, and for units that keep theirs: parameters that are not resharded after forward,
// gradients that are reduced only after the last micro-step.
void Fsdp::create_rings() {
  const FsdpOptions& options = context_.options;
  const bool shares_parameters = options.placement.reshard_after_forward;
  const bool shares_gradients = options.communicate == Communicate::kEveryMicroStep;
  std::int64_t max_gathered = 0, max_gradient = 0, max_staging = 0;
  int num_shared = 0;
  for (const auto& unit : units_) {
    max_staging = std::max(max_staging, unit->gradient_nbytes());
    if (unit->is_root()) continue;
    ++num_shared;
    max_gathered = std::max(max_gathered, unit->gathered_nbytes());
    max_gradient = std::max(max_gradient, unit->gradient_nbytes());
  }
  const int num_slots = std::min(options.prefetch, num_shared - 1) + 1;
  auto make_ring = [&](const std::string& name, std::int64_t nbytes, int count, Category category) {
    if (nbytes == 0 || count == 0) return static_cast<SlotRing*>(nullptr);
    rings_.push_back(std::make_unique<SlotRing>(context_.memory, name, nbytes, count, category));
    return rings_.back().get();
  };
  SlotRing* parameters = make_ring("parameter_slot", shares_parameters ? max_gathered : 0,
                                   num_slots, Category::kGatheredParameter);
  SlotRing* gradients = make_ring("gradient_slot", shares_gradients ? max_gradient : 0, num_slots,
                                  Category::kGradient);
  for (const auto& unit : units_) {
    unit->set_rings(
        unit->is_root() || !shares_parameters
            ? make_ring(unit->name(), unit->gathered_nbytes(), 1, Category::kGatheredParameter)
            : parameters,
        unit->is_root() || !shares_gradients
            ? make_ring(unit->name() + ".grad", unit->gradient_nbytes(), 1, Category::kGradient)
            : gradients);
  }
  const Precision& precision = options.precision;
  if (precision.reduce != precision.accumulate && max_staging > 0) {
    context_.reduce_staging =
        Tensor::empty(context_.memory, {max_staging / size_of(precision.accumulate)},
                      precision.reduce, "reduce_staging", Category::kCommunication);
  }
}

// The step
// -----------------------------------------------------------------------------------------

void Fsdp::begin_step(int num_micro_steps) {
  require(num_micro_steps >= 1, "[fsdp] expected at least 1 micro-step, got {}", num_micro_steps);
  num_micro_steps_ = num_micro_steps;
  micro_step_ = -1;
  for (const auto& unit : units_) unit->begin_step();
  next_micro_step();
}

void Fsdp::next_micro_step() {
  ++micro_step_;
  require(micro_step_ < num_micro_steps_,
          "[fsdp] expected begin_step and {} micro-steps, got one more", num_micro_steps_);
  context_.last_micro_step = micro_step_ + 1 == num_micro_steps_;
  schedule_.begin_micro_step();
  for (const auto& unit : units_) unit->begin_micro_step(compute_);
}

GradNorm Fsdp::finish_step() {
  require(num_micro_steps_ > 0 && context_.last_micro_step,
          "[fsdp] expected {} micro-steps before finish_step, got {}", num_micro_steps_,
          micro_step_ + 1);
  for (const auto& unit : units_) unit->finish_step(compute_);
  return reduce_norm(context_, compute_, units_, mean_scale());
}

double Fsdp::mean_scale() const { return 1.0 / (double(group_.size()) * num_micro_steps_); }

// Parameters
// ---------------------------------------------------------------------------------------

std::vector<Parameter*> Fsdp::parameters() const {
  std::vector<Parameter*> all;
  for (const auto& unit : units_) {
    for (const Flat& flat : unit->flats()) {
      all.insert(all.end(), flat.parameters.begin(), flat.parameters.end());
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Parameter* a, const Parameter* b) { return a->name < b->name; });
  return all;
}

Flat& Fsdp::flat_of(const Parameter& p, std::size_t& index) const {
  for (const auto& unit : units_) {
    for (Flat& flat : unit->flats()) {
      const auto it = std::find(flat.parameters.begin(), flat.parameters.end(), &p);
      if (it == flat.parameters.end()) continue;
      index = static_cast<std::size_t>(it - flat.parameters.begin());
      return flat;
    }
  }
  engine::fail("[fsdp] expected a wrapped parameter ({})", p.name);
}

std::vector<float> Fsdp::full_parameter(const Parameter& p) {
  std::size_t index = 0;
  const Flat& flat = flat_of(p, index);
  const Tensor full =
      Tensor::empty(context_.memory, p.shape, DType::kF32, p.name, Category::kWorkspace);
  for (const Segment& s : flat.segments) {
    if (s.parameter != index) continue;
    engine::copy(full.slice(s.parameter_begin, {s.numel}),
                 flat.master.slice(s.shard_begin, {s.numel}), compute_);
  }
  const int num_shards = flat.layout.num_shards();
  if (num_shards > 1) {
    context_.comm.wait(compute_.record("copied"));
    for (int r = 0; r < num_shards; ++r) {
      for (const Segment& s : flat.layout.segments(r)) {
        if (s.parameter != index) continue;
        group_.broadcast(full.slice(s.parameter_begin, {s.numel}), r, context_.comm, p.name);
      }
    }
    compute_.wait(context_.comm.record("broadcast"));
  }
  compute_.synchronize();
  std::vector<float> values = engine::to_vector<float>(full);
  if (compute_.device().is_cuda()) group_.check();  // an aborted broadcast ends without an error
  return values;
}

void Fsdp::load(const Parameter& p, std::span<const float> values) {
  require(static_cast<std::int64_t>(values.size()) == p.shape.numel(),
          "[fsdp] expected {} values for {}, got {} ({})", p.shape.numel(), p.shape.str(),
          values.size(), p.name);
  std::size_t index = 0;
  const Flat& flat = flat_of(p, index);
  context_.comm.synchronize();  // nobody still reads what is overwritten
  compute_.synchronize();
  for (const Segment& s : flat.segments) {
    if (s.parameter != index) continue;
    flat.master.slice(s.shard_begin, {s.numel})
        .copy_from_host(values.data() + s.parameter_begin, s.numel);
  }
}

void Fsdp::parameters_changed() {
  for (const auto& unit : units_) unit->refresh(compute_);
  context_.updated = compute_.record("updated");
}

std::uint64_t Fsdp::plan_hash() const { return hash(plan_); }

double clip_scale(float norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (double{norm} + 1e-6));
}

}  // namespace tessera::shard
