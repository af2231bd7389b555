#include "tools/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ratio>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/meta.h"
#include "tools/cli/stop.h"

namespace tessera::tools {

using engine::Category;
using engine::DType;
using engine::Tensor;

namespace {

std::unique_ptr<shard::Optimizer> make_optimizer(shard::Fsdp& fsdp, const StepConfig& c) {
  if (c.optimizer == OptimizerKind::kSgd) {
    return std::make_unique<shard::Sgd>(fsdp, shard::SgdOptions{.momentum = c.momentum});
  }
  return std::make_unique<shard::AdamW>(
      fsdp, shard::AdamWOptions{
                .beta1 = c.beta1, .beta2 = c.beta2, .eps = c.eps, .weight_decay = c.weight_decay});
}

shard::FsdpOptions with_listeners(shard::FsdpOptions options, const TrainerObservers& observers) {
  options.listener = observers.trace;
  options.step_listener = observers.probe;
  options.host_memory_listener = observers.host_memory;
  return options;
}

// What `fn` returns; its errors say the step, from 1.
template <class F>
auto of_step(std::int64_t step, F fn) {
  try {
    return fn();
  } catch (const engine::InvalidArgument& e) {
    throw engine::InvalidArgument(fmt::format("{} (step {})", e.what(), step));
  }
}

}  // namespace

// [Note: one step late]
// On a GPU the loss and the norm of a step are read after the next step was launched: the GPU has
// work while the host waits for them, and the host is never more than two steps ahead. What a step
// says - its line in the log, a loss or gradient that is not finite - comes that much later, and
// before a validation and at the end nothing is left. An update with a gradient that is not finite
// changes nothing, so the parameters are still those of the step that is named (but for updates
// during backward, which no norm precedes). On the CPU launching is doing, and nothing is late.

Trainer::Trainer(comm::ProcessGroup& world, const engine::Stream& compute,
                 const TrainConfig& config, const std::vector<engine::Block*>& blocks,
                 engine::Block* root, RunLog* log, const TrainerObservers& observers)
    : world_(world),
      config_(config),
      log_(log),
      trace_(observers.trace),
      probe_(observers.probe),
      compute_(compute),
      memory_(compute,
              {.limit_nbytes = config.memory_limit_nbytes(), .listener = observers.memory}),
      pinned_(engine::Memory::pinned(compute)),
      metrics_(compute.sibling("metrics", {.listener = trace_})),
      tape_(memory_, compute_),
      fsdp_(world, memory_, compute_, blocks, root,
            with_listeners(config.fsdp_options(world.size()), observers)),
      optimizer_(make_optimizer(fsdp_, config.train)) {
  tape_.listen(probe_);
  if (config.train.guards()) guard_.emplace(config.train);
  if (trace_ == nullptr) return;
  for (const auto& unit : fsdp_.units()) {
    std::vector<std::string> names;
    for (const engine::Block* block : unit->blocks()) names.push_back(block->name);
    trace_->add_unit(unit->name(), names);
  }
  trace_->count_memory("memory", memory_);
  if (uses_host_memory()) trace_->count_memory("host memory", fsdp_.host_memory());
}

// The global number of the first sample of this rank's `batch`. A run that went on from a
// checkpoint may have had other ranks and batches before.
std::int64_t Trainer::first_sample(std::int64_t batch) const {
  const std::int64_t since_start = batch - start_.step * config_.train.accum;
  return start_.sample + (since_start * world_.size() + world_.rank()) * config_.train.batch;
}

// What losses of the last step, which has been reduced, are divided by for their mean.
double Trainer::num_loss_terms() const {
  const double scale = fsdp_.mean_scale();  // 0: there are no terms
  return scale == 0 ? 1 : std::round(1 / scale);
}

TrainPosition Trainer::after(std::int64_t steps) const {
  const StepConfig& c = config_.train;
  return {.step = steps,
          .sample = start_.sample + (steps - start_.step) * c.accum * world_.size() * c.batch,
          .num_skips = num_skips_,
          .losses = guard_ ? guard_->losses() : std::vector<double>()};
}

TrainPosition Trainer::open_checkpoints(RunIdentity identity) {
  const CheckpointConfig& c = config_.checkpoint;
  if (!c.saves() && !c.resumes()) return start_;
  checkpoints_ = std::make_unique<RunCheckpoints>(world_, fsdp_, *optimizer_, config_,
                                                  std::move(identity), log_);
  start_ = checkpoints_->resume();
  num_steps_ = start_.step;
  num_skips_ = start_.num_skips;
  if (guard_) {
    for (const double loss : start_.losses) guard_->learn(loss);
  }
  return start_;
}

// What this rank knows; see stop.h.
int Trainer::why_to_stop() const {
  const std::chrono::duration<double, std::ratio<60>> elapsed = clock_() - begin_;
  const double most = config_.train.max_minutes;
  if (stop_requested() == 0 && most > 0 && elapsed.count() >= most) return kTimeIsUp;
  return stop_requested();
}

// All ranks end for the reason of the first that has one. Where it is the signal of another
// process, this one hurries from here on as that one does.
void Trainer::stop(int why) {
  if (stopped_by_ != 0 || why == 0) return;
  stopped_by_ = why;
  if (why != kTimeIsUp) request_stop(why);
}

// A probe for the values of one tensor needs no step after it.
std::int64_t Trainer::num_steps_to_run() const {
  const std::int64_t steps = config_.train.steps;
  const bool ends_early = probe_ != nullptr && probe_->options().target.has_value();
  return ends_early ? std::min(probe_->options().last_step, steps) : steps;
}

bool Trainer::is_validation_due(std::int64_t step) const {
  return config_.log.val_every > 0 && step % config_.log.val_every == 0;
}

// Whether the run that this one goes on from was stopped where it would have validated, after its
// last step.
bool Trainer::owes_validation() {
  const std::int64_t step = start_.step;
  if (step == 0 || step >= num_steps_to_run() || !is_validation_due(step)) return false;
  const bool is_logged = log_ != nullptr && log_->has_validation(step);
  return gather({is_logged ? 1.0f : 0.0f}).front() == 0;
}

void Trainer::run(const Data& data, const Loss& loss, const Validate& validate,
                  std::int64_t items_per_sample) {
  const StepConfig& c = config_.train;
  const std::int64_t num_steps = num_steps_to_run();
  const double items = static_cast<double>(world_.size()) * static_cast<double>(c.accum) *
                       static_cast<double>(c.batch) * static_cast<double>(items_per_sample);
  batches_ = std::make_unique<BatchLoader>(
      memory_, compute_, data.tensors, std::max<std::int64_t>(num_steps - start_.step, 0) * c.accum,
      [this, fill = data.fill, first = start_.step * c.accum](std::int64_t n, const Batch& host) {
        fill(first_sample(first + n), host);
      },
      trace_);
  num_targets_ = data.num_targets;
  engine::require(c.loss_mean == LossMean::kBatches || (num_targets_ && c.sums_losses()),
                  "[train] expected data that count targets for train.loss_mean=tokens, and a mean "
                  "that is chosen, got otherwise");
  create_graph(data.tensors);
  const bool is_late = compute_.device().is_cuda();
  // The last step. On a GPU it is kept until the next is launched, told already or not, so that
  // every step holds what the plan says.
  std::optional<Launched> last;
  bool is_pending = false;
  const std::function<void()> finish_last = [&] {
    if (std::exchange(is_pending, false)) finish(*last, items);
  };
  if (owes_validation()) validate_after(start_.step, validate);
  begin_ = clock_();
  for (std::int64_t step = start_.step; step < num_steps && stopped_by_ == 0; ++step) {
    if (!is_pending) last_end_ = nullptr;
    Launched launched = launch(step, loss, finish_last);
    finish_last();
    last = std::move(launched);
    is_pending = true;
    if (checkpoints_) checkpoints_->poll();
    const bool is_last = step + 1 == num_steps;
    const bool saves = checkpoints_ && checkpoints_->is_due(step + 1);
    const bool validates = !is_last && is_validation_due(step + 1);
    if (is_late && !validates && !saves && !is_last) continue;
    finish_last();
    if (!is_late) last.reset();
    if (saves) checkpoints_->save(after(num_steps_));
    if (validates && stopped_by_ == 0) validate_after(step + 1, validate);
  }
  finish_last();
  last.reset();
  if (log_ != nullptr) log_->end_steps();
  if (checkpoints_) {
    checkpoints_->save(after(num_steps_));
    checkpoints_->finish();  // what comes after the steps may fail
  }
  if (stopped_by_ == 0) validate_after(num_steps_, validate);
  if (stopped_by_ == 0 || log_ == nullptr) return;
  log_->say(fmt::format("stopped by {} after step {} of {}", signal_name(stopped_by_), num_steps_,
                        c.steps));
}

void Trainer::validate_after(std::int64_t step, const Validate& validate) {
  if (!validate) return;
  Validation v{};
  try {
    v = validate();
  } catch (const Stopped&) {
    return;
  }
  engine::require(std::isfinite(v.loss),
                  "[train] expected a finite validation loss, got {} (after step {})", v.loss,
                  step);
  if (stopped_by_ != 0) return;  // while it went on: what it has may not be all
  if (log_ != nullptr) {
    log_->validation(step, v.loss, v.remark, v.record);
    for (const std::string& line : v.lines) log_->say(line);
  }
  validation_ = std::move(v);
}

Trainer::Launched Trainer::launch(std::int64_t step, const Loss& loss,
                                  const std::function<void()>& finish_last) {
  const StepConfig& c = config_.train;
  StepClock clock(compute_);
  begin_peaks();
  const comm::Traffic before = world_.traffic();
  if (trace_ != nullptr) trace_->begin_step(step + 1);
  if (probe_ != nullptr) probe_->begin_step(step + 1);
  // One for each micro-step, and last the signal that asks this rank to stop: what all ranks know
  // of a step they know together, so they end after the same one.
  const Tensor values =
      Tensor::empty(memory_, {c.accum + 1}, DType::kF32, "values", Category::kCommunication);
  const double lr = c.lr_at(step);
  const bool overlaps = c.overlap_optimizer != OverlapOptimizer::kNone;
  if (overlaps) {
    optimizer_->step_in_backward(lr, c.overlap_optimizer == OverlapOptimizer::kInterleaved
                                         ? shard::UpdateGathers::kInterleaved
                                         : shard::UpdateGathers::kContiguous);
  }
  const bool is_graph = captures(step, loss);
  shard::GradNorm norm =
      is_graph ? run_graph(step, values, clock)
               : run_passes(
                     step, loss, values,
                     [this](std::int64_t) -> const Batch& { return batches_->next(); }, &clock);
  std::string replayed;
  if (guard_) norm = guard(step, loss, values, std::move(norm), replayed, finish_last);
  if (probe_ != nullptr) probe_->on_reduced(fsdp_);
  if (!overlaps && !is_graph) {
    clock.lap(StepPart::kOther);
    optimizer_->step(lr, norm, c.grad_clip);
    clock.lap(StepPart::kOptimizer);
  }
  if (probe_ != nullptr) probe_->on_updated(fsdp_, *optimizer_);
  engine::launch_set(compute_, values.slice(c.accum, {1}), static_cast<float>(why_to_stop()),
                     "keep_stop");
  clock.lap(StepPart::kOther);
  comm::HostGather kept(world_, values, metrics_, pinned_, "values");
  StepRecord record{.step = step + 1, .lr = lr};
  record.replayed = std::move(replayed);
  record_memory(record);
  const comm::Traffic after = world_.traffic();
  record.traffic = {after.num_collectives - before.num_collectives,
                    after.bytes_sent - before.bytes_sent};
  if (trace_ != nullptr) trace_->end_step();
  if (probe_ != nullptr) probe_->end_step();
  return {.record = std::move(record),
          .clock = std::move(clock),
          .values = std::move(kept),
          .norm = norm,
          .num_loss_terms = num_loss_terms(),
          .is_graph = is_graph};
}

// Forward and backward of all micro-steps, and the reduction of what they leave. `clock`: null for
// none.
shard::GradNorm Trainer::run_passes(std::int64_t step, const Loss& loss, const Tensor& values,
                                    const NextBatch& next, StepClock* clock) {
  const StepConfig& c = config_.train;
  const auto lap = [clock](StepPart part) {
    if (clock != nullptr) clock->lap(part);
  };
  for (std::int64_t micro = 0; micro < c.accum; ++micro) {
    if (probe_ != nullptr) probe_->begin_micro_step(micro);
    shard::MicroStep pass{.no_sync = c.accum_comm == AccumComm::kLast && micro + 1 < c.accum};
    if (c.sums_losses()) {
      // A plan has no data: any number does.
      pass.weight = num_targets_ ? num_targets_(first_sample(step * c.accum + micro)) : 1;
    }
    if (micro == 0) {
      fsdp_.begin_step(static_cast<int>(c.accum), pass);
    } else {
      fsdp_.next_micro_step(pass);
    }
    lap(StepPart::kOther);
    const Batch& batch = next(micro);
    lap(StepPart::kData);
    const Tensor value = loss(first_sample(step * c.accum + micro), batch);
    engine::copy(values.slice(micro, {1}), value, compute_, "keep_loss");
    // Before a backward that could only end in an error.
    if (value.device().is_host() && c.max_skips == 0 && !guard_) {
      check_loss(value.item(), step + 1, micro + 1, world_.rank());
    }
    tape_.backward(value);
    lap(StepPart::kCompute);
  }
  return of_step(step + 1, [&] { return fsdp_.finish_step(); });
}

void Trainer::begin_peaks() {
  peaks_ = with_peaks_of(memory_.stats(), peaks_);
  host_peaks_ = with_peaks_of(fsdp_.host_memory().stats(), host_peaks_);
  memory_.reset_peaks();
  engine::Memory(fsdp_.host_memory()).reset_peaks();
}

void Trainer::record_memory(StepRecord& record) {
  record.step_memory = memory_.stats();
  record.step_host_memory = fsdp_.host_memory().stats();
  record.memory = with_peaks_of(record.step_memory, peaks_);
  if (!uses_host_memory()) return;
  record.host_memory = with_peaks_of(record.step_host_memory, host_peaks_);
}

int Trainer::num_optimizer_states() const {
  return static_cast<int>(optimizer_->state_names().size());
}

std::vector<StepRecord> Trainer::plan(const std::vector<BatchTensor>& batch, const Loss& loss,
                                      std::int64_t num_steps,
                                      const std::function<void(std::int64_t step)>& before_step,
                                      bool repeats_last) {
  engine::require(compute_.device().is_meta, "[plan] expected a meta device, got {}",
                  to_string(compute_.device()));
  batches_ = std::make_unique<BatchLoader>(memory_, compute_, batch,
                                           num_steps * config_.train.accum, nullptr);
  create_graph(batch);
  engine::require(guard_ || !repeats_last, "[plan] expected a guard for a step to be made again");
  if (repeats_last) repeated_ = num_steps - 1;
  std::vector<StepRecord> records;
  std::optional<Launched> pending;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    before_step(step);
    const auto begin_ns = meta_now_ns(compute_), blocked_ns = compute_.blocked_ns();
    Launched launched = launch(step, loss, [] {});
    StepRecord& record = records.emplace_back(launched.record);
    record.step_ms = static_cast<double>(meta_now_ns(compute_) - begin_ns) * 1e-6;
    record.exposed_comm_ms = static_cast<double>(compute_.blocked_ns() - blocked_ns) * 1e-6;
    // A GPU's step is read after the launch of the next.
    if (compute_.device().is_cuda()) pending = std::move(launched);
  }
  return records;
}

// Reads and logs what the step left. The mean loss is over micro-steps and ranks, or over all
// targets that are learned, summed in the order of the samples.
void Trainer::finish(Launched& launched, double items) {
  StepRecord& record = launched.record;
  const std::int64_t accum = config_.train.accum;
  const std::vector<float> all = launched.values.wait<float>(compute_);
  // On a GPU the next step has begun.
  if (compute_.device().is_host()) launched.clock.lap(StepPart::kExposed);
  const auto value = [&](int rank, std::int64_t i) {
    return all[static_cast<std::size_t>(rank * (accum + 1) + i)];
  };
  // Known by now: the losses were gathered after the whole step.
  record.skipped = count_skip(launched.norm, record.step);
  double sum = 0;
  for (std::int64_t micro = 0; micro < accum; ++micro) {
    for (int rank = 0; rank < world_.size(); ++rank) {
      const float loss = value(rank, micro);
      if (record.skipped.empty()) check_loss(loss, record.step, micro + 1, rank);
      sum += loss;
    }
  }
  record.loss = sum / launched.num_loss_terms;
  for (int rank = 0; rank < world_.size(); ++rank) stop(static_cast<int>(value(rank, accum)));
  if (record.skipped.empty()) {
    record.grad_norm = of_step(record.step, [&] { return launched.norm.value(); });
  }

  if (compute_.device().is_host()) launched.clock.lap(StepPart::kOther);
  const StepClock::Times times = launched.clock.times(last_end_);
  last_end_ = launched.clock.end();
  record.step_ms = times.step_ms;
  record.items_per_s = items / times.step_ms * 1e3;
  record.exposed_comm_ms = times.exposed_comm_ms;
  record.data_ms = times.data_ms;
  if (!launched.is_graph) {
    record.compute_ms = times.compute_ms;
    if (config_.train.overlap_optimizer == OverlapOptimizer::kNone) {
      record.optimizer_ms = times.optimizer_ms;
    }
  }
  num_steps_ = record.step;
  if (log_ != nullptr) log_->step(record);
  if (on_step_) on_step_(record);
}

// Which gradient is not finite, so that the update was skipped; empty if all are. Throws when there
// were too many in a row.
std::string Trainer::count_skip(const shard::GradNorm& norm, std::int64_t step) {
  const std::int64_t most = config_.train.max_skips;
  if (most == 0) return "";  // a loss that is not finite is told first
  std::string where = norm.not_finite();
  num_skips_ = where.empty() ? 0 : num_skips_ + 1;
  engine::require(num_skips_ <= most,
                  "[train] expected at most {} update{} in a row to be skipped, got one more: the "
                  "gradient is not finite ({}) (step {})",
                  most, most == 1 ? "" : "s", where, step);
  return where;
}

void Trainer::check_loss(float loss, std::int64_t step, std::int64_t micro, int rank) const {
  engine::require(std::isfinite(loss),
                  "[train] expected a finite loss, got {} (step {}, micro-step {}, rank {})", loss,
                  step, micro, rank);
}

JsonRecord Trainer::end_record() const {
  JsonRecord record;
  record.add("steps", num_steps_);
  if (stopped_by_ != 0) record.add("stopped_by", signal_name(stopped_by_));
  return record;
}

}  // namespace tessera::tools
