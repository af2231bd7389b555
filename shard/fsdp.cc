#include "shard/fsdp.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "engine/error.h"
#include "shard/norm.h"
#include "shard/norm_words.h"
#include "shard/packing.h"
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
  options.placement.validate();
  require(options.prefetch >= 0, "[fsdp] expected prefetch of at least 0, got {}",
          options.prefetch);
  require(options.reductions_in_flight >= 0,
          "[fsdp] expected reductions_in_flight of at least 0, got {}",
          options.reductions_in_flight);
  check_packing(options);
  require(options.mean_ranks >= 0, "[fsdp] expected mean_ranks of at least 0, got {}",
          options.mean_ranks);
  const OffloadOptions& offload = options.offload;
  for (const auto& [name, fraction] : {std::pair{"parameters", offload.parameters},
                                       {"gradients", offload.gradients},
                                       {"optimizer", offload.optimizer}}) {
    require(fraction >= 0 && fraction <= 1, "[fsdp] expected offload.{} from 0 to 1, got {}", name,
            fraction);
  }
  require(offload.threads >= 1, "[fsdp] expected offload.threads of at least 1, got {}",
          offload.threads);
  const Placement& placement = options.placement;
  require(
      offload.parameters == 0 || can_offload_parameters(placement, options.precision),
      "[fsdp] expected parameters that are cut as their optimizer state is, or masters of their "
      "own (bf16), for offload.parameters, got {} in f32: the masters are what is computed with",
      to_string(placement));
  for (const DType dtype :
       {options.precision.param, options.precision.reduce, options.precision.accumulate}) {
    require(dtype == DType::kF32 || dtype == DType::kBF16, "[fsdp] expected f32 or bf16, got {}",
            name_of(dtype));
  }
}

// With what the defaults mean on so many ranks.
FsdpOptions resolved(FsdpOptions options, int num_ranks) {
  check(options);
  Placement& placement = options.placement;
  placement.shard_ranks = placement.shard_ranks_of(num_ranks);
  if (placement.reshard_ranks == placement.shard_ranks) placement.reshard_ranks = 0;
  if (placement.reshard_ranks == 1) {  // each rank keeps the whole
    placement.reshard_ranks = 0;
    placement.reshard_after_forward = false;
  }
  return options;
}

// The mesh that the options mean, which ranks agree on first: it is made by splitting `world`.
Mesh make_mesh(comm::ProcessGroup& world, const engine::Memory& memory,
               const engine::Stream& compute, const FsdpOptions& options) {
  require(memory.device() == compute.device() && (!memory.home() || *memory.home() == compute),
          "[fsdp] expected memory of stream '{}' on {}, got memory of {}{}", compute.name(),
          to_string(compute.device()), to_string(memory.device()),
          memory.home() ? " that belongs to stream '" + memory.home()->name() + "'" : "");
  agree(world, memory, compute, describe(options, world.size()));
  const Placement& placement = options.placement;
  return Mesh(world, placement.shard_ranks, placement.reshard_ranks, !placement.is_whole());
}

// Where parameters are whole nobody gathers, so each rank can run the units that it likes.
bool ranks_may_skip_units(const FsdpOptions& options) {
  return options.unused_parameters == UnusedParameters::kSkip &&
         options.placement.parameters == Place::kWhole;
}

void check_unique(const std::vector<Block*>& blocks, const Block* root,
                  const FsdpOptions& options) {
  std::map<const Parameter*, const Block*> owners;
  std::set<std::string> names;
  auto visit = [&](const Block& block) {
    require(block.hooks == nullptr, "[fsdp] expected a block that is not wrapped yet ({})",
            block.name);
    for (const Parameter* p : block.parameters) {
      if (options.ignores && options.ignores(*p)) continue;
      const auto [it, is_new] = owners.emplace(p, &block);
      require(is_new,
              "[fsdp] expected each parameter in one block, got '{}' in '{}' and '{}': put what "
              "blocks share into the root",
              p->name, it->second->name, block.name);
      require(names.insert(p->name).second, "[fsdp] expected unique parameter names, got two '{}'",
              p->name);
    }
    for (const Tensor& buffer : block.buffers) {
      require(buffer.defined(), "[fsdp] expected buffers with memory, got an undefined one ({})",
              block.name);
    }
  };
  for (const Block* block : blocks) visit(*block);
  if (root != nullptr) visit(*root);
}

// What SquareSum can sum exactly; better known now than after the first backward.
void check_numel(const std::vector<std::unique_ptr<Unit>>& units) {
  std::int64_t numel = 0;
  for (const auto& unit : units) {
    if (const Flat* flat = unit->trainable()) numel += flat->layout.value_numel();
  }
  require(numel < kMaxNormNumel, "[fsdp] expected fewer than {} trainable parameters, got {}",
          kMaxNormNumel, numel);
}

}  // namespace

Fsdp::Fsdp(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& compute,
           const std::vector<Block*>& blocks, Block* root, FsdpOptions options)
    : group_(group),
      compute_(compute),
      context_{
          .mesh = make_mesh(group, memory, compute, options = resolved(options, group.size())),
          .memory = memory,
          .pinned = engine::Memory::pinned(
              compute, {.poison = memory.poisons(), .listener = options.host_memory_listener}),
          .gather = compute.sibling("gather", options.stream_options(0)),
          .reduce = compute.sibling("reduce", options.stream_options(1)),
          .options = options,
          .offload = options.offload.any() ? std::make_unique<Offload>(compute, options) : nullptr},
      schedule_(options.prefetch, options.backward_prefetch, options.placement,
                ranks_may_skip_units(options)),
      num_exceptions_(std::uncaught_exceptions()) {
  check_unique(blocks, root, options);
  create_units(blocks, root);
  if (context_.options.offload.gradients > 0 && memory.device().is_cuda()) {
    context_.norm_words = make_norm_words(memory);
  }
  create_checks();
  plan_ = describe(options, context_.mesh, units_);
  agree(group, memory, compute_, plan_);
  create_rings();
  for (const auto& unit : units_) {
    require(context_.options.unused_parameters == UnusedParameters::kZero ||
                unit->reducer() == nullptr || !unit->reducer()->remembers(),
            "[fsdp] expected UnusedParameters::kZero with a communication hook that remembers "
            "earlier steps, got kSkip: what it owes to a parameter that is not used would be lost "
            "({})",
            unit->name());
  }
  parameters_changed();
  broadcast_buffers(0);
}

Fsdp::~Fsdp() {
  if (std::uncaught_exceptions() > num_exceptions_) {
    group_.abort("another error ended the training loop");
  }
  // Collectives read slots, which die before the streams do, and a GPU may still write what the
  // host was to read. Whoever waited for work that failed has been told.
  if (update_) update_->synchronize_quietly();
  if (context_.offload != nullptr) context_.offload->synchronize_quietly();
  for (const engine::Stream* stream : {&context_.gather, &context_.reduce, &compute_}) {
    stream->synchronize_quietly();
  }
}

void Fsdp::synchronize() const {
  context_.gather.synchronize();
  context_.reduce.synchronize();
  if (context_.offload != nullptr) context_.offload->synchronize();
}

void Fsdp::create_units(const std::vector<Block*>& blocks, Block* root) {
  auto next = blocks.begin();
  for (const std::size_t num_blocks : packs_of(blocks, context_.options)) {
    const auto end = next + static_cast<std::ptrdiff_t>(num_blocks);
    units_.push_back(std::make_unique<Unit>(context_, std::vector<Block*>(next, end), false));
    next = end;
  }
  if (root != nullptr) {
    units_.push_back(std::make_unique<Unit>(context_, std::vector<Block*>{root}, true));
  }
  for (const auto& unit : units_) schedule_.add(*unit);
}

void Fsdp::create_checks() {
  check_numel(units_);
  if (!context_.options.check_gradients) return;
  std::vector<const Parameter*> parameters;
  for (const auto& unit : units_) {
    if (const Flat* flat = unit->trainable()) {
      parameters.insert(parameters.end(), flat->parameters.begin(), flat->parameters.end());
    }
  }
  context_.check = std::make_shared<GradientCheck>(context_.memory, std::move(parameters));
}

// Shared rings of prefetch + 1 and reductions_in_flight + 1 slots; a ring of one slot for the root,
// whose region encloses the others, and for units that keep their parameters after forward.
void Fsdp::create_rings() {
  const FsdpOptions& options = context_.options;
  const bool shares_parameters = options.placement.reshard_after_forward;
  std::int64_t max_gathered = 0, max_gradient = 0, max_staging = 0;
  int num_shared = 0;
  for (const auto& unit : units_) {
    max_staging = std::max(max_staging, unit->gradient_nbytes());
    if (unit->is_root()) continue;
    ++num_shared;
    max_gathered = std::max(max_gathered, unit->gathered_nbytes());
    max_gradient = std::max(max_gradient, unit->gradient_nbytes());
  }
  auto make_ring = [&](const std::string& name, std::int64_t nbytes, int count, Category category) {
    if (nbytes == 0 || count == 0) return static_cast<SlotRing*>(nullptr);
    rings_.push_back(std::make_unique<SlotRing>(context_.memory, name, nbytes, count, category));
    return rings_.back().get();
  };
  const auto num_slots = [&](int ahead) { return std::min(ahead, num_shared - 1) + 1; };
  SlotRing* parameters = make_ring("parameter_slot", shares_parameters ? max_gathered : 0,
                                   num_slots(options.prefetch), Category::kGatheredParameter);
  SlotRing* gradients = make_ring("gradient_slot", max_gradient,
                                  num_slots(options.reductions_in_flight), Category::kGradient);
  const Precision& precision = options.precision;
  Tensor staging;
  if (precision.reduce != precision.accumulate && max_staging > 0) {
    staging = Tensor::empty(context_.memory, {max_staging / size_of(precision.accumulate)},
                            precision.reduce, "reduce_staging", Category::kCommunication);
  }
  create_sum_slots();
  auto sum_slot = sum_slots_.rbegin();  // the root's is the first, others take turns
  std::int64_t first_parameter = 0;
  for (const auto& unit : units_) {
    SumSlot* sum = nullptr;
    if (!sum_slots_.empty()) {
      sum = unit->is_root() ? &sum_slots_.front() : &*sum_slot;
      if (++sum_slot == sum_slots_.rend()) sum_slot = sum_slots_.rbegin();
    }
    unit->set_up(
        unit->is_root() || !shares_parameters
            ? make_ring(unit->name(), unit->gathered_nbytes(), 1, Category::kGatheredParameter)
            : parameters,
        unit->is_root()
            ? make_ring(unit->name() + ".grad", unit->gradient_nbytes(), 1, Category::kGradient)
            : gradients,
        staging, sum, first_parameter);
    first_parameter += static_cast<std::int64_t>(unit->used().size());
  }
}

// As many as reductions can be on their way, so that one is written to the host while the next is
// reduced; the root's may be the largest.
void Fsdp::create_sum_slots() {
  if (context_.options.offload.gradients == 0) return;
  std::int64_t max_nbytes = 0, root_nbytes = 0;
  int num_units = 0;
  for (const auto& unit : units_) {
    std::int64_t& nbytes = unit->is_root() ? root_nbytes : max_nbytes;
    nbytes = std::max(nbytes, unit->sum_nbytes());
    num_units += unit->sum_nbytes() > 0 ? 1 : 0;
  }
  const int count = std::min(context_.options.reductions_in_flight + 1, num_units);
  for (int i = 0; i < count; ++i) {
    sum_slots_.push_back({engine::Buffer::create(
        context_.memory, "sum_slot", i == 0 ? std::max(max_nbytes, root_nbytes) : max_nbytes,
        Category::kGradient)});
  }
}

std::uint64_t Fsdp::plan_hash() const { return hash(plan_); }

}  // namespace tessera::shard
