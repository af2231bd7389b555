// Times Tessera beside the alternatives on this machine: OpenBLAS, memcpy, PyTorch.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tools/bench_parts.h"
#include "tools/flags.h"
#include "tools/main.h"

namespace tessera::tools {
namespace {

using Part = std::pair<std::string, std::function<void(const BenchConfig&, BenchReport&)>>;

// In the order in which they run.
const std::vector<Part>& all_parts() {
  static const std::vector<Part> kParts = {{"gemm", bench_gemm},
                                           {"collectives", bench_collectives},
                                           {"ops", bench_ops},
                                           {"steps", bench_steps},
                                           {"profile", bench_profile}};
  return kParts;
}

std::set<std::string> wanted_parts(const std::string& list) {
  std::string names;
  std::set<std::string> known, wanted;
  for (const auto& [name, run] : all_parts()) {
    names += (names.empty() ? "" : ", ") + name;
    known.insert(name);
  }
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string name = list.substr(begin, end - begin);
    engine::require(known.contains(name), "[bench] expected parts of {}, got '{}' (bench.parts)",
                    names, name);
    wanted.insert(name);
    begin = end + 1;
  }
  return wanted;
}

// What the figures mean nothing without.
void report_machine(BenchReport& report) {
  std::string cpu = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("model name")) continue;
    cpu = line.substr(line.find(':') + 2);
    break;
  }
  double load = 0;
  getloadavg(&load, 1);
  report.begin_table("machine", "Machine. load: runnable threads before the benchmark",
                     {"cpu", "threads", "load"});
  report.row({cpu, std::thread::hardware_concurrency(), Cell(load, 2)});
}

void run(int argc, char** argv) {
  BenchConfig config;
  FlagSet flags("bench", "Times Tessera beside OpenBLAS, memcpy and PyTorch on this machine.");
  flags.add("bench.parts", &config.parts,
            {.help = "comma-separated list of gemm, collectives, ops, steps, profile"});
  flags.add("bench.rows", &config.rows, {.help = "only rows whose name contains this; empty: all"});
  flags.add("bench.samples", &config.samples,
            {.help = "times each gemm, collective and op is sampled", .min = 1, .max = 100000});
  flags.add("bench.rounds", &config.rounds,
            {.help = "rounds of training, ours and PyTorch's in turn", .min = 1, .max = 1000});
  flags.add("bench.steps", &config.steps,
            {.help = "timed training steps in a round", .min = 1, .max = 100000});
  flags.add("bench.python", &config.python,
            {.help = "Python interpreter that has PyTorch; empty: leave PyTorch out"});
  flags.add("bench.peer", &config.peer,
            {.help = "PyTorch script to run; empty: tools/peers/torch_gpt.py"});
  flags.add("bench.jsonl", &config.jsonl, {.help = "file of one JSON line a row; empty: none"});
  if (!flags.parse(argc, argv, std::cout)) return;
  const std::set<std::string> wanted = wanted_parts(config.parts);
  // A bare name is looked up in PATH.
  if (config.python.find('/') != std::string::npos) {
    config.python = resolve_user_path(config.python);
  }
  config.peer = config.peer.empty() ? "tools/peers/torch_gpt.py" : resolve_user_path(config.peer);

  BenchReport report(resolve_user_path(config.jsonl));
  report_machine(report);
  for (const auto& [name, run_part] : all_parts()) {
    if (wanted.contains(name)) run_part(config, report);
  }
  engine::require(report.num_rows() > 1,
                  "[bench] expected bench.rows to be part of a row's name, got '{}'", config.rows);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
