// Times Tessera next to the alternatives on this machine: OpenBLAS, memcpy, PyTorch, tokenizers.
#include "tools/bench/parts.h"
#include "tools/bench/tokenize.h"
#include "tools/cli/main.h"
#include "tools/config/data/default_data.h"

namespace tessera::tools {
namespace {

void run(int argc, char** argv) {
  FlagSet flags("bench", "Times Tessera next to OpenBLAS, memcpy and PyTorch on this machine.");
  run_bench(argc, argv, flags, {},
            {{"rates", bench_rates},
             {"gemm", bench_gemm, {"samples"}},
             {"collectives", bench_collectives, {"samples"}},
             {"flight", bench_flight, {"samples"}},
             {"replicas", bench_replicas, {"samples"}},
             {"host", bench_host, {"samples"}},
             {"ops", bench_ops, {"samples"}},
             {"prefetch",
              [](const BenchConfig& config, BenchReport& report) {
                bench_prefetch(prefetch_row(), config, report);
              },
              {"rounds", "steps"}},
             {"offload",
              [](const BenchConfig& config, BenchReport& report) {
                bench_offload(offload_row(), config, report);
              },
              {"rounds", "steps"}},
             {"hooks",
              [](const BenchConfig& config, BenchReport& report) {
                bench_hooks(hooks_row(), /*num_steps=*/300, config, report);
              }},
             {"checkpoint", bench_checkpoint, {"python", "peer"}},
             {"listeners", bench_listeners, {"rounds", "steps"}},
             {"tokenize",
              [](const BenchConfig& config, BenchReport& report) {
                bench_tokenize(kDefaultText, config, report);
              },
              {"rounds", "python", "peer", "tokenizer"}},
             {"plan", bench_plan, {"samples"}},
             {"processes", bench_processes, {"rounds", "samples", "steps", "python", "peer"}},
             {"steps",
              [](const BenchConfig& config, BenchReport& report) {
                bench_steps(training_rows(), config, report);
              },
              {"rounds", "steps", "python", "peer"}},
             {measured_presets().front(),
              [](const BenchConfig& config, BenchReport& report) {
                bench_steps(preset_rows(), config, report);
              },
              {"rounds", "steps", "python", "peer"}},
             {"smollm2-135m",
              [](const BenchConfig& config, BenchReport& report) {
                bench_steps(smollm2_rows(), config, report);
              },
              {"rounds", "steps", "python", "peer"}},
             {"profile", bench_profile, {"steps"}}});
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
