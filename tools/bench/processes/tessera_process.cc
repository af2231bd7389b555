// One of several processes that a launcher starts: collectives between them, or training steps of
// one of process_rows(). Process 0 prints JSON lines.
#include <iostream>
#include <memory>

#include "comm/process_group.h"
#include "engine/error.h"
#include "tools/bench/processes/calls.h"
#include "tools/bench/training/training.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/config/train_config.h"
#include "tools/io/jsonl.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/launch/launcher.h"
#include "tools/launch/processes.h"
#include "tools/machine/environment.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using comm::ProcessGroup;
using engine::Tensor;

class Ours final : public Collectives {
 public:
  explicit Ours(ProcessGroup& world) : world_(world) {}
  int process() const override { return world_.rank(); }
  int num_processes() const override { return world_.size(); }
  void all_gather(const Tensor& in, const Tensor& out) override {
    world_.all_gather(in, out, stream_, "bench");
  }
  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    world_.reduce_scatter(in, out, comm::Accumulate::kNo, stream_, "bench");
  }
  void all_reduce(const Tensor& in, const Tensor& out) override {
    world_.all_reduce(in, out, comm::Accumulate::kNo, stream_, "bench");
  }
  void broadcast(const Tensor& inout, int root) override {
    world_.broadcast(inout, root, stream_, "bench");
  }

 private:
  ProcessGroup& world_;
  engine::Stream stream_ = engine::Stream::inline_cpu("comm");
};

void run(int argc, char** argv) {
  TrainConfig config;
  std::int64_t samples = 11, steps = 10, row = 0;
  FlagSet flags("tessera_process", "One process of what //tools:bench times between several.");
  config.parallel.add_launch_to(flags);
  flags.add("samples", &samples, {.help = "of each collective; 0: none", .min = 0});
  flags.add("steps", &steps, {.help = "timed training steps; 0: none", .min = 0});
  flags.add("row", &row,
            {.help = "which training", .min = 0, .max = std::ssize(process_rows()) - 1});
  if (!flags.parse(argc, argv, std::cout)) return;
  choose_cpu_by_environment();
  const Launch launch = find_launch(environment(), config.parallel.launcher);
  engine::require(launch.num_processes > 1, "[bench] expected several processes, got {}",
                  launch.str());
  run_processes(
      config, launch, /*num_threads=*/1, /*gpus=*/{}, {}, nullptr, [&](ProcessGroup& world) {
        if (samples > 0) {
          Ours ours(world);
          time_calls(ours, samples);
        }
        if (steps > 0) {
          const TrainingTimes times =
              train_rank(world, process_rows()[static_cast<std::size_t>(row)], steps);
          if (world.rank() == 0) {
            std::cout << JsonRecord().add("step_ms", median(times.step_ms)).line() << std::flush;
          }
        }
        world.barrier("end");
      });
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
