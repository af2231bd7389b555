#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/threads.h"
#include "engine/memory.h"
#include "tools/bench/parts.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using comm::FlightRecorder;
using engine::Stream;
using engine::Tensor;

constexpr int kNumCalls = 2000;

// Of one call, on the slowest rank.
double call_us(int ranks, std::shared_ptr<FlightRecorder> flight) {
  std::vector<double> us(static_cast<std::size_t>(ranks));
  comm::run_ranks(ranks, {.flight = std::move(flight)}, [&](comm::ProcessGroup& world) {
    const Stream stream = Stream::inline_cpu("inline");
    const Tensor in = Tensor::zeros(engine::Memory(), {1}, engine::DType::kF32, "in");
    const Tensor out = Tensor::zeros(engine::Memory(), {1}, engine::DType::kF32, "out");
    world.barrier("bench");
    const Timer timer;
    for (int i = 0; i < kNumCalls; ++i) {
      world.all_reduce(in, out, comm::Accumulate::kNo, stream, "bench");
    }
    us[static_cast<std::size_t>(world.rank())] = timer.ms() * 1e3 / kNumCalls;
  });
  return *std::max_element(us.begin(), us.end());
}

// What recording adds: one call, its start and its end.
double record_us() {
  FlightRecorder recorder;
  comm::FlightRing& ring = recorder.ring(0);
  const Timer timer;
  for (int i = 0; i < kNumCalls; ++i) {
    const std::int64_t number =
        ring.called(0, i, {.op = "all_reduce", .dtype = "f32", .numel = 1, .label = "bench"});
    ring.enter(number, comm::FlightState::kStarted);
    ring.enter(number, comm::FlightState::kFinished);
  }
  return timer.ms() * 1e3 / kNumCalls;
}

}  // namespace

void bench_flight(const BenchConfig& config, BenchReport& report) {
  report.begin_table("flight",
                     fmt::format("What the flight recorder costs: {} all-reduces of one element, "
                                 "the smallest call there is. record_us: recording alone",
                                 kNumCalls),
                     {"ranks", "without_us", "with_us", "record_us"});
  for (const int ranks : {1, 2, 4}) {
    const std::string name = fmt::format("{}", ranks);
    if (!config.wants(name)) continue;
    std::vector<double> without_us, with_us, alone_us;
    for (std::int64_t s = -2; s < config.samples; ++s) {  // two that do not count
      const double without = call_us(ranks, nullptr);
      const double with = call_us(ranks, std::make_shared<FlightRecorder>());
      const double alone = record_us();
      if (s < 0) continue;
      without_us.push_back(without);
      with_us.push_back(with);
      alone_us.push_back(alone);
    }
    report.row(
        {name, Cell(median(without_us), 3), Cell(median(with_us), 3), Cell(median(alone_us), 3)});
  }
}

}  // namespace tessera::tools
