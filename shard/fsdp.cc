#include "shard/fsdp.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "comm/host_gather.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/norm.h"
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
  require(options.shard_ranks >= 0, "[fsdp] expected shard_ranks of at least 0, got {}",
          options.shard_ranks);
  require(!options.placement.is_whole() || options.shard_ranks <= 1,
          "[fsdp] expected no shard_ranks where nothing is sharded, got {} ({})",
          options.shard_ranks, to_string(options.placement));
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
  if (options.shard_ranks == 0) options.shard_ranks = placement.is_whole() ? 1 : num_ranks;
  if (placement.reshard_ranks == options.shard_ranks) placement.reshard_ranks = 0;
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
  return Mesh(world, options.shard_ranks, options.placement.reshard_ranks,
              !options.placement.is_whole());
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
    for (const Flat& flat : unit->flats()) numel += flat.trainable ? flat.layout.value_numel() : 0;
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
    for (const Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      parameters.insert(parameters.end(), flat.parameters.begin(), flat.parameters.end());
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

// As many as reductions can be on their way, so that one is written to the host beside the next;
// the root's may be the largest.
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

// The step
// -----------------------------------------------------------------------------------------

void Fsdp::begin_step(int num_micro_steps, const MicroStep& first) {
  require(num_micro_steps >= 1, "[fsdp] expected at least 1 micro-step, got {}", num_micro_steps);
  check_whole("begin_step");
  require(phase_ != Phase::kStep,
          "[fsdp] expected finish_step() or cancel_step() before the next begin_step(), got a step "
          "of which {} of {} micro-steps have begun",
          micro_step_ + 1, num_micro_steps_);
  check_not_held("begin_step()");
  for (const auto& unit : units_) {
    for (const Flat& flat : unit->flats()) {
      for (const Parameter* p : flat.parameters) {
        require(p->trainable == flat.trainable,
                "[fsdp] expected trainable={} as when it was wrapped, or trainable_changed(), got "
                "{} ({})",
                flat.trainable, p->trainable, p->name);
      }
    }
  }
  require(!joined_ || joined_->total > 0,
          "[fsdp] expected no step behind a join() that returned 0: no rank has a batch (rank {})",
          group_.rank());
  require(!joined_ || joined_->num_micro_steps == num_micro_steps,
          "[fsdp] expected the {} micro-steps that join() returned, got {} (rank {})",
          joined_ ? joined_->num_micro_steps : 0, num_micro_steps, group_.rank());
  broadcast_buffers(joined_ ? joined_->first_rank : 0);
  settle_step();
  num_micro_steps_ = num_micro_steps;
  const int mean_ranks =
      context_.options.mean_ranks == 0 ? group_.size() : context_.options.mean_ranks;
  num_batches_ = joined_ ? joined_->total : std::int64_t{mean_ranks} * num_micro_steps;
  micro_step_ = -1;
  for (const auto& unit : units_) unit->begin_step(compute_);
  if (context_.options.non_finite == NonFinite::kSkip && context_.options.reducer) {
    unsettled_ = Unsettled{};
  }
  if (context_.check != nullptr) context_.check->begin_step(compute_);
  if (context_.norm_words.defined()) {  // behind what a step that was given up may still add
    context_.reduce.wait(compute_.record("norm read"));
    engine::launch_fill(context_.reduce, context_.norm_words, 0, "norm.clear");
  }
  begin_micro_step(first);
  phase_ = Phase::kStep;
}

void Fsdp::next_micro_step(const MicroStep& next) {
  require(phase_ == Phase::kStep, "[fsdp] expected begin_step() before next_micro_step()");
  require(micro_step_ + 1 < num_micro_steps_, "[fsdp] expected {} micro-steps, got one more",
          num_micro_steps_);
  end_micro_step();
  begin_micro_step(next);
}

void Fsdp::end_micro_step() {
  const bool has_batch = joined_ && micro_step_ < joined_->num_batches;
  require(!has_batch || schedule_.has_run_backward(),
          "[fsdp] expected a backward in micro-step {} of {}, for which join() was told that there "
          "is a batch, got none (rank {})",
          micro_step_ + 1, num_micro_steps_, group_.rank());
  schedule_.end_micro_step(compute_);
}

void Fsdp::begin_micro_step(const MicroStep& options) {
  const bool is_last = micro_step_ + 2 == num_micro_steps_;
  require(options.num_backwards >= 1, "[fsdp] expected at least 1 backward, got {}",
          options.num_backwards);
  require(!is_last || !options.no_sync,
          "[fsdp] expected the last micro-step to reduce gradients, got no_sync");
  ++micro_step_;
  group_.declare(fmt::format("micro-step {} of {}, no_sync {}, {} backwards", micro_step_ + 1,
                             num_micro_steps_, options.no_sync, options.num_backwards));
  if (context_.check != nullptr) context_.check->begin_micro_step(micro_step_);
  schedule_.begin_micro_step(options, is_last);
  if (joined_ && micro_step_ >= joined_->num_batches) schedule_.shadow(compute_);
}

template <class T>
std::vector<T> Fsdp::gather_to_host(const std::vector<T>& values, std::string_view label) {
  context_.gather.wait(compute_.record(label));
  return comm::gather_to_host<T>(group_, values, context_.memory, context_.gather, label);
}

int Fsdp::join(int num_batches) {
  require(phase_ != Phase::kStep, "[fsdp] expected join() between steps, got it inside one");
  require(context_.options.mean_ranks == 0,
          "[fsdp] expected no join() with mean_ranks, got {}: ranks of other groups are not asked",
          context_.options.mean_ranks);
  require(num_batches >= 0, "[fsdp] expected a number of batches, got {} (rank {})", num_batches,
          group_.rank());
  const std::vector<std::int64_t> all = gather_to_host(
      std::vector<std::int64_t>{num_batches, schedule_.can_shadow() ? 1 : 0}, "join");
  Joined joined{.num_batches = num_batches};
  for (std::size_t i = 0; i < all.size(); i += 2) {
    joined.num_micro_steps = std::max(joined.num_micro_steps, static_cast<int>(all[i]));
    if (joined.total == 0) joined.first_rank = static_cast<int>(i / 2);
    joined.total += all[i];
  }
  for (std::size_t i = 0; i < all.size() && joined.total > 0; i += 2) {
    require(all[i] > 0 || all[i + 1] != 0,
            "[fsdp] expected a batch on every rank until each has completed a micro-step, got none "
            "on rank {}",
            i / 2);
  }
  if (joined.total == 0) broadcast_buffers(last_joined_);
  if (joined.total > 0) last_joined_ = joined.first_rank;
  joined_ = joined;
  return joined.num_micro_steps;
}

GradNorm Fsdp::finish_step() {
  require(phase_ == Phase::kStep, "[fsdp] expected begin_step() before finish_step()");
  require(micro_step_ + 1 == num_micro_steps_,
          "[fsdp] expected {} micro-steps before finish_step(), got {}", num_micro_steps_,
          micro_step_ + 1);
  schedule_.on_final(nullptr);  // what is reduced from here on is updated below
  end_micro_step();
  phase_ = Phase::kIdle;
  joined_.reset();
  for (const auto& unit : units_) unit->finish_step(compute_);
  if (early_) {
    try {
      finish_early_update();
    } catch (...) {
      early_.reset();
      throw;
    }
  }
  context_.mesh.agree(compute_);
  if (context_.options.unused_parameters == UnusedParameters::kSkip) find_unused();
  // Behind the gather of the norm all gathers are done, those that nobody used as well, and the
  // optimizer may write what they read. Where no norm is gathered:
  const Placement& placement = context_.options.placement;
  if (placement.parameters != shard::Place::kWhole &&
      context_.mesh.group_of(placement.optimizer) == nullptr) {
    compute_.wait(context_.gather.record("gathered"));
  }
  const std::optional<Early> early = std::exchange(early_, std::nullopt);
  GradNorm norm = reduce_norm(context_, compute_, units_, mean_scale());
  if (!compute_.is_capturing()) {
    std::erase_if(norms_in_flight_, [](const GradNorm& n) { return n.is_known(); });
    norms_in_flight_.push_back(norm);
  }
  if (unsettled_) unsettled_->norm = norm;
  phase_ = early ? Phase::kIdle : Phase::kFinished;
  if (early && updates_on_host()) {
    for (const bool root : {true, false}) {  // as the next forward needs them
      for (const auto& unit : units_) {
        if (unit->is_root() == root) gather_updated(*unit);
      }
    }
    early->update.end();
  }
  return norm;
}

void Fsdp::find_unused() {
  std::vector<std::uint8_t> used;
  for (const auto& unit : units_) used.insert(used.end(), unit->used().begin(), unit->used().end());
  const std::vector<std::uint8_t> all = gather_to_host(used, "used");
  for (std::size_t i = 0; i < all.size(); ++i) used[i % used.size()] |= all[i];
  auto next = used.begin();
  for (const auto& unit : units_) {
    std::vector<std::uint8_t> unused(unit->used().size());
    for (std::uint8_t& is_unused : unused) is_unused = *next++ == 0 ? 1 : 0;
    unit->set_unused(std::move(unused));
  }
}

void Fsdp::check_whole(std::string_view caller) const {
  require(phase_ != Phase::kBroken,
          "[{}] expected units that are whole, got an Fsdp whose trainable_changed() failed",
          caller);
}

void Fsdp::cancel_step() {
  require(!early_ || early_->updated.empty(),
          "[fsdp] expected finish_step() behind a backward that has updated parameters, got "
          "cancel_step()");
  schedule_.on_final(nullptr);
  early_.reset();
  schedule_.cancel(compute_);
  phase_ = Phase::kIdle;
  joined_.reset();
  if (unsettled_ && !unsettled_->is_taken) unsettled_->skips = true;
}

void Fsdp::settle_step() const {
  if (!unsettled_) return;
  require(
      phase_ != Phase::kStep,
      "[fsdp] expected finish_step() or cancel_step() before what hooks remember is read, got a "
      "step of which {} of {} micro-steps have begun",
      micro_step_ + 1, num_micro_steps_);
  const std::optional<GradNorm>& norm = unsettled_->norm;
  const bool counts =
      !unsettled_->skips && (compute_.device().is_meta || (norm && norm->not_finite().empty()));
  unsettled_.reset();
  for (const auto& unit : units_) {
    if (unit->reducer() != nullptr) unit->reducer()->end_step(counts);
  }
}

void Fsdp::take_gradients(std::string_view update, bool skips) {
  require(phase_ == Phase::kFinished,
          "[optimizer] expected begin_step(), backward and finish_step() before each step()");
  if (skips && unsettled_) unsettled_->skips = true;
  check_not_held("an update");
  wait_for_readers();
  group_.declare(update);
  schedule_.close_visits(compute_);
  if (unsettled_) unsettled_->is_taken = true;
  phase_ = Phase::kIdle;
}

// Updates of what is offloaded too begin behind work of compute: see UpdateParts.
void Fsdp::wait_for_readers() { compute_.wait(std::exchange(values_read_, {})); }

// [Note: early updates]
// A unit whose gradient is final in the last micro-step has no use left, unless a region that is
// still to be recomputed uses what is frozen of it, or uses it without gradient. Behind the
// reduction, and behind the last such use, a stream of its own may update it while backward goes
// on. Peers read the unit's part no more: its last gather is complete, here and so everywhere. The
// root, and what that backward does not reach, follow in finish_step(), behind all gathers, as some
// of these may be for nobody; finish_step() waits for all updates. The order is that of the
// reductions and replays, so it is the same on all ranks. Elements are updated with the same
// numbers as at the end, so bits are too; but the norm of the gradient comes too late to clip it,
// or to skip what is not finite.

void Fsdp::take_gradients_early(std::string_view update, EarlyUpdate early) {
  require(phase_ != Phase::kStep && !early_,
          "[optimizer] expected one step_in_backward() before begin_step(), got {}",
          early_ ? "two" : "it inside a step");
  require(context_.options.non_finite == NonFinite::kThrow,
          "[optimizer] expected NonFinite::kThrow for a step_in_backward(), got kSkip: what is not "
          "finite is known behind it");
  require(
      context_.options.unused_parameters == UnusedParameters::kZero,
      "[optimizer] expected unused parameters to have the gradient zero in a step_in_backward(), "
      "got UnusedParameters::kSkip: what is unused is known behind it");
  wait_for_readers();
  group_.declare(update);
  early_ = Early{.update = std::move(early)};
  schedule_.on_final([this](Unit& unit) { update_early(unit); });
  if (update_) return;
  update_ = compute_.sibling("optimizer", context_.options.stream_options(2));
}

void Fsdp::end_updates() noexcept {
  if (!early_ && context_.offload == nullptr) return;
  schedule_.on_final(nullptr);
  early_.reset();
  if (std::uncaught_exceptions() > num_exceptions_) {
    group_.abort("another error ended the training loop");
  }
  if (update_) update_->synchronize_quietly();
  if (context_.offload != nullptr) context_.offload->synchronize_quietly();
}

void Fsdp::update_early(Unit& unit) {
  unit.reshard(compute_);  // the slot need not wait for the update
  if (early_->updated.empty()) {
    wait_for_readers();  // who came behind step_in_backward()
    early_->update.begin();
    update_->wait(compute_.record("prepared"));
  }
  early_->updated.insert(&unit);
  unit.forbid_use();
  update_->wait(compute_.record("last_use"));
  unit.wait_for_gather(*update_);
  unit.wait_for_sums(*update_);
  early_->update.update_unit(unit, *update_);
}

// Those that are left as in a step of its own, the root first.
void Fsdp::finish_early_update() {
  schedule_.close_visits(compute_);
  if (context_.options.placement.parameters != Place::kWhole) {
    compute_.wait(context_.gather.record("gathered"));
  }
  if (early_->updated.empty()) {
    wait_for_readers();
    early_->update.begin();
  }
  for (const bool root : {true, false}) {
    for (const auto& unit : units_) {
      if (unit->is_root() != root || early_->updated.contains(unit.get())) continue;
      early_->update.update_unit(*unit, compute_);
    }
  }
  for (const auto& unit : units_) {
    if (gathers_later(*unit) && !updates_on_host()) unit->gather_renewed();
  }
  compute_.wait(update_->record("updated"));
  if (!updates_on_host()) early_->update.end();
}

// Whether finish_step() gathers what an update beside backward renewed. Gathers that wait for the
// host would hold up those of backward, and of the norm.
bool Fsdp::gathers_later(const Unit& unit) const {
  return early_ && (updates_on_host() || (early_->update.gathers == UpdateGathers::kContiguous &&
                                          early_->updated.contains(&unit)));
}

bool Fsdp::updates_on_host() const { return context_.options.offload.optimizer > 0; }

void Fsdp::updated(Unit& unit, const engine::Stream& stream,
                   const std::vector<WrittenOnHost>& on_host) {
  unit.renew(stream, on_host);
  if (!gathers_later(unit)) gather_updated(unit);
}

void Fsdp::gather_updated(Unit& unit) {
  unit.gather_renewed();
  if (unit.is_root() && !compute_.is_capturing()) unit.unshard(compute_, "forward");
}

void Fsdp::parameters_changed() {
  if (context_.offload != nullptr) context_.offload->synchronize();
  schedule_.close_visits(compute_);
  for (const auto& unit : units_) {
    unit->renew_all(compute_);
    unit->gather_renewed();
  }
}

std::uint64_t Fsdp::plan_hash() const { return hash(plan_); }

}  // namespace tessera::shard
