#include <fmt/format.h>

#include <memory>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/memory.h"
#include "shard/mesh.h"
#include "shard/reducer.h"
#include "tools/bench/parts.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using comm::Accumulate;
using comm::ProcessGroup;
using engine::DType;
using engine::Stream;
using engine::Tensor;
using shard::Place;

struct Case {
  int ranks, shard_ranks;
  std::int64_t nbytes;

  std::string name() const {
    return fmt::format("{} replicas x {} shards, {} MB", ranks / shard_ranks, shard_ranks,
                       nbytes / 1'000'000);
  }
};

struct Times {
  std::vector<double> turns_ms, scatter_ms, gather_ms;
};

// One gradient of f32, and the two ways of summing it in the order of ranks.
Times run_rank(ProcessGroup& world, const Case& c, std::int64_t num_samples) {
  const engine::Memory memory;
  const Stream stream = Stream::worker_cpu("reduce");
  const shard::Mesh mesh(world, c.shard_ranks);
  const shard::Layout layout(std::vector{c.nbytes / engine::size_of(DType::kF32)}, world.size());
  const Tensor in = Tensor::zeros(memory, {layout.flat_numel()}, DType::kF32, "gradient");
  const shard::Range range = layout.part(mesh.part(Place::kShard), mesh.num_parts(Place::kShard));
  const auto reducer =
      shard::make_reducer({.name = "turns",
                           .parameters = {},
                           .layout = layout,
                           .range = range,
                           .place = Place::kShard,
                           .mesh = mesh,
                           .precision = {},
                           .memory = memory,
                           .pinned = memory,
                           .stream = stream,
                           .sum = Tensor::empty(memory, {range.numel}, DType::kF32, "sum"),
                           .staging = {}});
  const Tensor part =
      Tensor::zeros(memory, {layout.flat_numel() / world.size()}, DType::kF32, "part");
  const Tensor shard = Tensor::zeros(memory, reducer->sum().shape(), DType::kF32, "shard");
  const auto time = [&](auto fn) {
    world.barrier("bench");
    const Timer timer;
    fn();
    stream.synchronize();
    return timer.ms();
  };
  Times times;
  reducer->begin_step();
  for (std::int64_t s = -2; s < num_samples; ++s) {  // two that do not count
    const double turns = time([&] { reducer->reduce(in, {}, false); });
    const double scatter = time([&] {
      mesh.reduce().world->reduce_scatter(in, part, Accumulate::kYes, stream, "through all");
    });
    const double gather =
        time([&] { mesh.reduce().replicate->all_gather(part, shard, stream, "through all"); });
    if (s < 0) continue;
    times.turns_ms.push_back(turns);
    times.scatter_ms.push_back(scatter);
    times.gather_ms.push_back(gather);
  }
  return times;
}

}  // namespace

void bench_replicas(const BenchConfig& config, BenchReport& report) {
  report.begin_table(
      "replicas",
      "Reductions over replicas x shards of thread ranks, in the order of ranks. turns: replicas "
      "one after the other, as hsdp does, each micro-step; through all: every rank a part of its "
      "own each micro-step, and once a step the parts of a shard gathered; ratio: a step of one "
      "micro-step through all to one in turns",
      {"reduction", "turns_ms", "through_all_ms", "gather_ms", "ratio"});
  for (const auto& [ranks, shard_ranks] : {std::pair{4, 2}, {8, 4}, {8, 2}}) {
    for (const std::int64_t nbytes : {1'000'000, 40'000'000}) {
      const Case c{ranks, shard_ranks, nbytes};
      if (!config.wants(c.name())) continue;
      std::vector<Times> times(static_cast<std::size_t>(ranks));
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        times[static_cast<std::size_t>(world.rank())] = run_rank(world, c, config.samples);
      });
      const double turns = median_of_slowest(times, &Times::turns_ms);
      const double scatter = median_of_slowest(times, &Times::scatter_ms);
      const double gather = median_of_slowest(times, &Times::gather_ms);
      report.row({c.name(), Cell(turns, 3), Cell(scatter, 3), Cell(gather, 3),
                  Cell((scatter + gather) / turns, 2)});
    }
  }
}

}  // namespace tessera::tools
