#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "engine/memory.h"
#include "tools/bench/parts.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using comm::Accumulate;
using comm::ProcessGroup;
using engine::DType;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

struct Case {
  Collective op;
  DType dtype;  // of what is sent
  std::int64_t nbytes;
  int ranks;

  std::string name() const {
    const char* names[] = {"all_gather", "reduce_scatter", "all_reduce"};
    return fmt::format("{} {} {} MB, {} ranks", names[static_cast<int>(op)], name_of(dtype),
                       nbytes / 1'000'000, ranks);
  }
};

struct Times {
  std::vector<double> collective_ms, memcpy_ms, exchange_ms;
};

// Starts when all ranks are there.
double time_together(ProcessGroup& world, const std::function<void()>& fn) {
  world.barrier("bench");
  const Timer timer;
  fn();
  return timer.ms();
}

// `sources`: by rank, a place for the address of what it has.
Times run_rank(ProcessGroup& world, const Case& c, std::int64_t num_samples,
               std::vector<std::byte*>& sources) {
  const Memory memory;
  const Stream stream = Stream::worker_cpu("comm");
  // A whole number of shards.
  const std::int64_t shard = c.nbytes / engine::size_of(c.dtype) / c.ranks;
  const std::int64_t whole = shard * c.ranks;
  const bool gathers = c.op == Collective::kAllGather;
  const Tensor in = Tensor::zeros(memory, {gathers ? shard : whole}, c.dtype, "in");
  const Tensor out = Tensor::zeros(memory, {c.op == Collective::kReduceScatter ? shard : whole},
                                   gathers ? c.dtype : DType::kF32, "out");
  const Tensor source = Tensor::zeros(memory, {whole}, c.dtype, "source");
  const Tensor copy = Tensor::zeros(memory, {whole}, c.dtype, "copy");
  const auto collective = [&] {
    switch (c.op) {
      case Collective::kAllGather:
        world.all_gather(in, out, stream, "bench");
        break;
      case Collective::kReduceScatter:
        world.reduce_scatter(in, out, Accumulate::kNo, stream, "bench");
        break;
      case Collective::kAllReduce:
        world.all_reduce(in, out, Accumulate::kNo, stream, "bench");
        break;
    }
    stream.synchronize();
  };
  const auto plain_copy = [&] {
    std::memcpy(copy.raw(), source.raw(), static_cast<std::size_t>(copy.nbytes()));
  };
  sources[static_cast<std::size_t>(world.rank())] = source.raw();
  const auto shard_nbytes = static_cast<std::size_t>(shard * engine::size_of(c.dtype));
  const auto exchange = [&] {
    for (std::size_t r = 0; r < sources.size(); ++r) {
      std::memcpy(copy.raw() + r * shard_nbytes, sources[r] + r * shard_nbytes, shard_nbytes);
    }
  };
  Times times;
  for (std::int64_t s = -2; s < num_samples; ++s) {  // two that do not count
    const double collective_ms = time_together(world, collective);
    const double memcpy_ms = time_together(world, plain_copy);
    // Into the caches of the core that has it, as a gradient is that a step has just computed.
    std::memset(source.raw(), 1, static_cast<std::size_t>(source.nbytes()));
    const double exchange_ms = time_together(world, exchange);
    world.barrier("bench");  // nobody writes or frees what another rank still reads
    if (s < 0) continue;
    times.collective_ms.push_back(collective_ms);
    times.memcpy_ms.push_back(memcpy_ms);
    times.exchange_ms.push_back(exchange_ms);
  }
  return times;
}

// Ranks that sleep until the last has come: what a collective of nothing takes, on no stream.
double barrier_us(int ranks) {
  constexpr int kCount = 1000;
  double us = 0;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    for (int i = 0; i < kCount / 10; ++i) world.barrier("bench");  // do not count
    const Timer timer;
    for (int i = 0; i < kCount; ++i) world.barrier("bench");
    if (world.rank() == 0) us = timer.ms() * 1e3 / kCount;
  });
  return us;
}

}  // namespace

void bench_collectives(const BenchConfig& config, BenchReport& report) {
  report.note(
      fmt::format("a barrier takes {:.1f} us of 2 ranks, {:.1f} of 4; on a stream of its "
                  "own a collective also starts that stream's thread and wakes its waiter",
                  barrier_us(2), barrier_us(4)));
  report.begin_table("collectives",
                     "Collectives of thread ranks next to memcpy of the same bytes by as many "
                     "threads. gb_per_s: of a rank; all: of all ranks; ratio: to memcpy; exchange: "
                     "memcpy of each rank's part from that rank, which has just written it",
                     {"collective", "ms", "gb_per_s", "all_gb_per_s", "memcpy_gb_per_s", "ratio",
                      "exchange_gb_per_s", "exchange_ratio"});
  for (const int ranks : {2, 4}) {
    for (const std::int64_t nbytes : {1'000'000, 40'000'000}) {
      for (const auto op :
           {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce}) {
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          const Case c{op, dtype, nbytes, ranks};
          if (!config.wants(c.name())) continue;
          std::vector<Times> times(static_cast<std::size_t>(ranks));
          std::vector<std::byte*> sources(static_cast<std::size_t>(ranks));
          comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
            times[static_cast<std::size_t>(world.rank())] =
                run_rank(world, c, config.samples, sources);
          });
          const double collective_ms = median_of_slowest(times, &Times::collective_ms);
          const double memcpy_ms = median_of_slowest(times, &Times::memcpy_ms);
          const double exchange_ms = median_of_slowest(times, &Times::exchange_ms);
          const auto gb_per_s = [&](double ms) { return static_cast<double>(nbytes) / ms * 1e-6; };
          report.row({c.name(), Cell(collective_ms, 3), gb_per_s(collective_ms),
                      gb_per_s(collective_ms) * ranks, gb_per_s(memcpy_ms),
                      Cell(memcpy_ms / collective_ms, 2), gb_per_s(exchange_ms),
                      Cell(exchange_ms / collective_ms, 2)});
        }
      }
    }
  }
}

}  // namespace tessera::tools
