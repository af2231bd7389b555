// The parts of the benchmark. Each prints a table and is independent of the others.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/bench/report.h"
#include "tools/bench/training/training.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

struct BenchConfig {
  std::string parts = "rates,gemm,collectives,replicas,host,ops,steps";
  std::string rows;           ///< substring of the names of rows to run
  std::int64_t samples = 11;  ///< of gemm, collectives, ops
  std::int64_t rounds = 3;    ///< of steps: each runs ours, then PyTorch
  std::int64_t steps = 10;    ///< timed in each round
  std::string python;         ///< interpreter with PyTorch; empty: none
  std::string peer;           ///< script
  std::string tokenizer;      ///< folder of tokenizer.json; empty: none
  std::string jsonl;          ///< file; empty: none

  bool wants(const std::string& row) const { return row.find(rows) != std::string::npos; }
};

/// The words of a comma-separated list.
std::vector<std::string> list_of(const std::string& text);

struct BenchPart {
  std::string name;
  std::function<void(const BenchConfig&, BenchReport&)> run;
  std::vector<std::string> options =
      {};  ///< "rounds" of bench.rounds: those that not all parts use
};

/// The program `flags` belongs to: parses, reports the machine, runs the wanted `parts` in their
/// order. `config` holds the defaults. Throws InvalidArgument for an option of other parts alone.
void run_bench(int argc, char** argv, FlagSet& flags, BenchConfig config,
               const std::vector<BenchPart>& parts);

/// The rates of this machine that plans take.
void bench_rates(const BenchConfig& config, BenchReport& report);
/// Our matrix product next to OpenBLAS's, one thread.
void bench_gemm(const BenchConfig& config, BenchReport& report);
/// Collectives of thread ranks next to memcpy by as many threads.
void bench_collectives(const BenchConfig& config, BenchReport& report);
/// Checkpoints next to dd and PyTorch's.
void bench_checkpoint(const BenchConfig& config, BenchReport& report);
/// Collectives of thread ranks with and without a flight recorder.
void bench_flight(const BenchConfig& config, BenchReport& report);
/// Training steps without a listener, with a trace, and with a probe.
void bench_listeners(const BenchConfig& config, BenchReport& report);
/// Plans of trainings on 8 ranks.
void bench_plan(const BenchConfig& config, BenchReport& report);
/// Collectives and training steps of ranks that are processes, which it starts, next to those of
/// Open MPI and Gloo and to threads.
void bench_processes(const BenchConfig& config, BenchReport& report);
/// Two ways of reducing over replicas x shards of thread ranks.
void bench_replicas(const BenchConfig& config, BenchReport& report);
/// What the host does for an op besides its work.
void bench_host(const BenchConfig& config, BenchReport& report);
/// Single kernels at the sizes of the 10.8M model.
void bench_ops(const BenchConfig& config, BenchReport& report);
/// The steps of `base` over links of stated bandwidth, with and without gathering ahead.
void bench_prefetch(const TrainingRow& base, const BenchConfig& config, BenchReport& report);
/// What the model of `base` learns of text in equal time with and without communication hooks: when
/// the first is done with `num_steps`, at least 2.
void bench_hooks(const TrainingRow& base, std::int64_t num_steps, const BenchConfig& config,
                 BenchReport& report);
/// The steps of `base` with parts of its state in memory of the host, next to those without.
void bench_offload(const TrainingRow& base, const BenchConfig& config, BenchReport& report);
/// Whole training steps next to PyTorch's.
void bench_steps(const std::vector<TrainingRow>& rows, const BenchConfig& config,
                 BenchReport& report);
/// The time of the steps of training_rows() and preset_rows() by kernel.
void bench_profile(const BenchConfig& config, BenchReport& report);

}  // namespace tessera::tools
