#include "tools/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

#include "engine/error.h"
#include "tools/sha256.h"

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

}  // namespace

Trainer::Trainer(comm::ProcessGroup& world, const TrainConfig& config,
                 const std::vector<engine::Block*>& blocks, engine::Block* root, RunLog* log)
    : world_(world),
      config_(config),
      log_(log),
      compute_(engine::Stream::inline_cpu("compute")),
      metrics_(engine::Stream::worker_cpu("metrics")),
      tape_(memory_, compute_),
      fsdp_(world, memory_, compute_, blocks, root, config.fsdp_options()),
      optimizer_(make_optimizer(fsdp_, config.train)) {}

void Trainer::run(const Loss& loss, const Validate& validate, std::int64_t items_per_sample) {
  const StepConfig& c = config_.train;
  const double items = static_cast<double>(world_.size()) * static_cast<double>(c.accum) *
                       static_cast<double>(c.batch) * static_cast<double>(items_per_sample);
  const auto validate_after = [&](std::int64_t step) {
    if (!validate) return;
    const Validation v = validate();
    val_loss_ = v.loss;
    if (log_ != nullptr) log_->validation(step, v.loss, v.remark);
  };
  for (std::int64_t step = 0; step < c.steps; ++step) {
    StepRecord record{.step = step, .lr = c.lr_at(step)};
    const auto begin = std::chrono::steady_clock::now();
    const std::int64_t blocked_ns = compute_.blocked_ns();
    record.loss = train_step(step, loss, record);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    record.step_ms = elapsed.count();
    record.items_per_s = items / elapsed.count() * 1e3;
    record.exposed_comm_ms = static_cast<double>(compute_.blocked_ns() - blocked_ns) * 1e-6;
    record.memory = memory_.stats();
    if (log_ != nullptr) log_->step(record);
    const bool is_last = step + 1 == c.steps;
    if (!is_last && config_.log.val_every > 0 && (step + 1) % config_.log.val_every == 0) {
      validate_after(step + 1);
    }
  }
  validate_after(c.steps);
}

// One step; returns the mean loss over micro-steps and ranks, summed in the order of the samples.
double Trainer::train_step(std::int64_t step, const Loss& loss, StepRecord& record) {
  const StepConfig& c = config_.train;
  std::vector<float> losses;
  fsdp_.begin_step(static_cast<int>(c.accum));
  for (std::int64_t micro = 0; micro < c.accum; ++micro) {
    if (micro > 0) fsdp_.next_micro_step();
    const std::int64_t first = ((step * c.accum + micro) * world_.size() + world_.rank()) * c.batch;
    const Tensor value = loss(first);
    losses.push_back(value.item());
    engine::require(std::isfinite(losses.back()),
                    "[train] expected a finite loss, got {} (step {}, micro-step {}, rank {})",
                    losses.back(), step, micro, world_.rank());
    tape_.backward(value);
  }
  try {
    record.grad_norm = fsdp_.finish_step();
  } catch (const engine::InvalidArgument& e) {
    throw engine::InvalidArgument(fmt::format("{} (step {})", e.what(), step));
  }
  optimizer_->step(record.lr, shard::clip_scale(record.grad_norm, c.grad_clip));

  const std::vector<float> all = gather(losses);
  double sum = 0;
  for (std::size_t micro = 0; micro < losses.size(); ++micro) {
    for (std::size_t i = micro; i < all.size(); i += losses.size()) sum += all[i];
  }
  return sum / static_cast<double>(all.size());
}

std::vector<float> Trainer::gather(const std::vector<float>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  const Tensor in = Tensor::from<float>(memory_, {n}, values, "values", Category::kCommunication);
  const Tensor out = Tensor::empty(memory_, {n * world_.size()}, DType::kF32, "values of all ranks",
                                   Category::kCommunication);
  world_.all_gather(in, out, metrics_, "values");
  compute_.wait(metrics_.record("gathered"));
  const auto span = out.span<float>();
  return {span.begin(), span.end()};
}

double Trainer::mean_loss(std::int64_t num_batches,
                          const std::function<Tensor(std::int64_t batch)>& loss) {
  const std::int64_t ranks = world_.size();
  std::vector<float> mine;
  for (std::int64_t first = 0; first < num_batches; first += ranks) {
    // All ranks run as many forwards, since each one gathers: the last round may repeat a batch.
    const std::int64_t batch = std::min(first + world_.rank(), num_batches - 1);
    mine.push_back(tape_.no_grad([&] { return loss(batch).item(); }));
  }
  const std::vector<float> all = gather(mine);
  double sum = 0;
  for (std::int64_t batch = 0; batch < num_batches; ++batch) {
    sum += all[static_cast<std::size_t>(batch % ranks) * mine.size() +
               static_cast<std::size_t>(batch / ranks)];
  }
  return sum / static_cast<double>(num_batches);
}

std::string Trainer::params_sha256() {
  Sha256 sha;
  for (const engine::Parameter* p : fsdp_.parameters()) {
    const std::vector<float> values = fsdp_.full_parameter(*p);
    sha.update(std::as_bytes(std::span(values)));
  }
  return sha.hex();
}

std::int64_t largest_divisor(std::int64_t n, std::int64_t most) {
  std::int64_t d = std::min(n, most);
  while (d > 1 && n % d != 0) --d;
  return d;
}

}  // namespace tessera::tools
