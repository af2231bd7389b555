// What it costs training that a trace or a probe listens.
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/philox.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/training.h"
#include "tools/launch/ranks.h"
#include "tools/models/family.h"
#include "tools/probe/probe.h"
#include "tools/rates/timing.h"
#include "tools/trace/trace.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using engine::DType;

struct Way {
  const char* name;
  bool has_trace = false, has_probe = false;
  bool records = false;  // every step, or none
};
constexpr std::array kWays = {Way{"no listener"}, Way{"trace, no step", true},
                              Way{"trace, every step", true, false, true},
                              Way{"probe, every step", false, true, true}};

constexpr std::int64_t kRanks = 2, kBatch = 2;

double processor_ms() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

struct Times {
  std::vector<double> step_ms;  // of rank 0
  std::vector<double> cpu_ms;   // of a step of all ranks, in the mean over a round

  void add(const Times& more) {
    step_ms.insert(step_ms.end(), more.step_ms.begin(), more.step_ms.end());
    cpu_ms.insert(cpu_ms.end(), more.cpu_ms.begin(), more.cpu_ms.end());
  }
};

Times run(const Way& way, const ModelConfig& sizes, std::int64_t num_steps) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = kRanks;
  config.train.steps = kWarmupSteps + num_steps;
  config.train.batch = kBatch;
  config.train.lr = 3e-4;
  const std::int64_t last_step = way.records ? config.train.steps : 0;
  std::int64_t nbytes = 0;  // what would be written is only made
  TraceWriter writer([&nbytes](const std::string& text) { nbytes += std::ssize(text); });
  Times times;
  double begin_ms = 0;
  const Ranks ranks = Ranks::choose(config);
  ranks.run(config, [&](comm::ProcessGroup& world) {
    const int rank = world.rank();
    std::optional<TraceRecorder> trace;
    if (way.has_trace) trace.emplace(writer, TraceOptions{.process = rank, .last_step = last_step});
    TraceRecorder* const recorder = trace ? &*trace : nullptr;
    std::optional<Probe> probe;
    if (way.has_probe) {
      probe.emplace(ProbeOptions{.rank = rank, .num_ranks = world.size(), .last_step = last_step},
                    [](std::int64_t, const std::vector<ProbePart>&) {});
    }
    const std::unique_ptr<LanguageModel> model = sizes.make();
    {
      Trainer trainer(world, ranks.compute(rank, {.listener = recorder}), config, model->blocks(),
                      model->root(), /*log=*/nullptr,
                      {.trace = recorder, .probe = probe ? &*probe : nullptr});
      if (rank == 0) {
        trainer.on_step([&](const StepRecord& step) {
          if (step.step == kWarmupSteps) begin_ms = processor_ms();
          if (step.step > kWarmupSteps) times.step_ms.push_back(step.step_ms);
          if (step.step < config.train.steps) return;
          times.cpu_ms = {(processor_ms() - begin_ms) / static_cast<double>(num_steps)};
        });
      }
      const auto fill = [&sizes](std::int64_t first, const Batch& host) {
        const engine::RandomStream random{1, static_cast<std::uint64_t>(first)};
        std::uint64_t index = 0;
        for (const engine::Tensor& tensor : host) {
          for (std::int32_t& token : tensor.span<std::int32_t>()) {
            token = static_cast<std::int32_t>(random.bits(index++) %
                                              static_cast<std::uint32_t>(sizes.vocab));
          }
        }
      };
      const engine::Shape shape{kBatch, sizes.seq};
      trainer.run(
          {{{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}}, fill},
          [&](std::int64_t, const Batch& batch) { return model->loss(trainer.tape(), batch, {}); },
          /*validate=*/nullptr, sizes.seq);
    }
    if (trace) trace->finish();
  });
  writer.close();
  return times;
}

}  // namespace

void bench_listeners(const BenchConfig& config, BenchReport& report) {
  const ModelConfig sizes = bench_model(4, 4, 128, 256);
  const std::string name =
      TrainingRow{.model = sizes, .batch = kBatch, .ranks = static_cast<int>(kRanks)}.name();
  if (!config.wants("listeners " + name)) return;
  std::array<Times, kWays.size()> times;
  for (std::int64_t round = 0; round < config.rounds; ++round) {
    for (std::size_t w = 0; w < kWays.size(); ++w) {
      times[w].add(run(kWays[w], sizes, config.steps));
    }
  }
  report.begin_table(
      "listeners",
      fmt::format("{}, {} rounds of {} steps in turn. cpu: processor time of a step, of "
                  "both ranks; min: of a round. more: than without a listener",
                  name, config.rounds, config.steps),
      {"listener", "ms", "min_ms", "max_ms", "more_pct", "cpu_ms", "min_cpu_ms", "cpu_more_pct",
       "min_cpu_more_pct"});
  const Measurement none = Measurement::of(times[0].step_ms);
  const Measurement cpu_none = Measurement::of(times[0].cpu_ms);
  for (std::size_t w = 0; w < kWays.size(); ++w) {
    const Measurement t = Measurement::of(times[w].step_ms), cpu = Measurement::of(times[w].cpu_ms);
    report.row({kWays[w].name, Cell(t.median_ms, 2), Cell(t.min_ms, 2), Cell(t.max_ms, 2),
                100 * (t.median_ms / none.median_ms - 1), Cell(cpu.median_ms, 2),
                Cell(cpu.min_ms, 2), 100 * (cpu.median_ms / cpu_none.median_ms - 1),
                100 * (cpu.min_ms / cpu_none.min_ms - 1)});
  }
}

}  // namespace tessera::tools
