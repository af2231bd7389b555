#include "tools/bench_training.h"

#include <fmt/format.h>

#include "comm/threads.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer.h"
#include "tools/bench_timing.h"

namespace tessera::tools {

using engine::DType;
using engine::Tensor;

std::string TrainingRow::name() const {
  return fmt::format("{}x{} batch {} {}, {}", model.layers, model.dim, batch, name_of(param),
                     ranks == 1 ? "1 rank" : fmt::format("{} ranks {}", ranks, strategy));
}

const std::vector<TrainingRow>& training_rows() {
  static const GptConfig kMedium{.layers = 6, .heads = 6, .dim = 384, .seq = 256};
  static const GptConfig kSmall{.layers = 4, .heads = 4, .dim = 128, .seq = 256};
  static const std::vector<TrainingRow> kRows = {
      {.model = kMedium},
      {.model = kMedium, .ranks = 2},
      {.model = kMedium, .ranks = 2, .strategy = "ddp"},
      {.model = kMedium, .batch = 1},
      {.model = kMedium, .batch = 1, .ranks = 2},
      {.model = kMedium, .batch = 1, .ranks = 2, .strategy = "ddp"},
      {.model = kMedium, .batch = 1, .ranks = 2, .param = DType::kBF16},
      {.model = kSmall},
      {.model = kSmall, .ranks = 4},
  };
  return kRows;
}

namespace {

TrainingTimes run_rank(comm::ProcessGroup& world, const TrainingRow& row, std::int64_t num_steps,
                       LaunchLog* log) {
  const engine::Memory memory;
  const auto compute = engine::Stream::inline_cpu("compute", {.listener = log});
  engine::Tape tape(memory, compute);
  Gpt gpt(row.model);
  shard::Fsdp fsdp(world, memory, compute, gpt.blocks(), gpt.root(),
                   {.placement = shard::Placement::preset(row.strategy),
                    .precision = {.param = row.param},
                    .listener = log});
  shard::AdamW adamw(fsdp, {});

  const engine::RandomStream random{1, static_cast<std::uint64_t>(world.rank())};
  std::uint64_t index = 0;
  const Tensor tokens = tape.empty({row.batch, row.model.seq}, DType::kI32, "tokens");
  const Tensor targets = tape.empty(tokens.shape(), DType::kI32, "targets");
  const auto draw = [&](const Tensor& t) {
    const auto vocab = static_cast<std::uint32_t>(row.model.vocab);
    for (std::int32_t& token : t.span<std::int32_t>()) {
      token = static_cast<std::int32_t>(random.bits(index++) % vocab);
    }
  };

  TrainingTimes times;
  for (std::int64_t step = -kWarmupSteps; step < num_steps; ++step) {
    draw(tokens);
    draw(targets);
    if (step == 0 && log != nullptr) log->clear();
    const std::int64_t blocked_ns = compute.blocked_ns();
    const Timer timer;
    fsdp.begin_step();
    const Tensor loss = gpt.loss(tape, tokens, targets, {});
    const double forward_end = timer.ms();
    tape.backward(loss);
    const double backward_end = timer.ms();
    fsdp.finish_step();
    const double finish_end = timer.ms();
    adamw.step(3e-4);
    const double step_end = timer.ms();
    if (step < 0) continue;
    times.step_ms.push_back(step_end);
    times.forward_ms.push_back(forward_end);
    times.backward_ms.push_back(backward_end - forward_end);
    times.finish_ms.push_back(finish_end - backward_end);
    times.optimizer_ms.push_back(step_end - finish_end);
    times.exposed_comm_ms.push_back(static_cast<double>(compute.blocked_ns() - blocked_ns) * 1e-6);
  }
  return times;
}

}  // namespace

TrainingTimes run_training(const TrainingRow& row, std::int64_t num_steps, LaunchLog* log) {
  TrainingTimes first;
  comm::run_ranks(row.ranks, {}, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    TrainingTimes mine = run_rank(world, row, num_steps, is_first ? log : nullptr);
    if (is_first) first = std::move(mine);
  });
  return first;
}

}  // namespace tessera::tools
