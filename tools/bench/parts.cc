#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <span>
#include <string>

#include "engine/error.h"
#include "tools/bench/parts.h"
#include "tools/cli/run_files.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/cpu_model.h"
#include "tools/machine/limits.h"

namespace tessera::tools {
namespace {

std::string names_of(const std::vector<BenchPart>& parts) {
  std::string names;
  for (const BenchPart& part : parts) names += (names.empty() ? "" : ", ") + part.name;
  return names;
}

std::set<std::string> wanted_parts(const std::string& list, const std::vector<BenchPart>& parts) {
  std::set<std::string> known, wanted;
  for (const BenchPart& part : parts) known.insert(part.name);
  for (const std::string& name : list_of(list)) {
    engine::require(known.contains(name), "[bench] expected parts of {}, got '{}' (bench.parts)",
                    names_of(parts), name);
    wanted.insert(name);
  }
  return wanted;
}

void check_used(const FlagSet& flags, const std::vector<BenchPart>& parts,
                const std::set<std::string>& wanted) {
  std::map<std::string, std::set<std::string>> users;  // of each option
  for (const BenchPart& part : parts) {
    for (const std::string& option : part.options) users[option].insert(part.name);
  }
  for (const auto& [option, names] : users) {
    const bool is_used =
        std::ranges::any_of(names, [&](const std::string& n) { return wanted.contains(n); });
    engine::require(is_used || !flags.is_given("bench." + option),
                    "[bench] expected bench.{} with one of the parts {}, got it with {}", option,
                    fmt::join(names, ", "), fmt::join(wanted, ", "));
  }
}

// What the figures mean nothing without.
void report_machine(BenchReport& report) {
  double load = 0;
  getloadavg(&load, 1);
  report.begin_table(
      "machine",
      "Machine. cores: that this process may use; load: runnable threads before the benchmark",
      {"cpu", "cores", "load"});
  report.row({cpu_model(), read_limits().usable_cores(), Cell(load, 2)});
}

}  // namespace

std::vector<std::string> list_of(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

void run_bench(int argc, char** argv, FlagSet& flags, BenchConfig config,
               const std::vector<BenchPart>& parts) {
  flags.add("bench.parts", &config.parts,
            {.help = "comma-separated list of " + names_of(parts) +
                     "; an option that none of these uses is refused"});
  flags.add("bench.rows", &config.rows, {.help = "only rows whose name contains this; empty: all"});
  flags.add("bench.samples", &config.samples,
            {.help = "times what is not a training step is sampled", .min = 1, .max = 100000});
  flags.add("bench.rounds", &config.rounds,
            {.help = "rounds of training, ours and PyTorch's in turn", .min = 1, .max = 1000});
  flags.add("bench.steps", &config.steps,
            {.help = "timed training steps in a round", .min = 1, .max = 100000});
  flags.add("bench.python", &config.python,
            {.help = "Python interpreter that has PyTorch, or the package tokenizers for the part "
                     "tokenize; empty: leave them out"});
  flags.add("bench.peer", &config.peer,
            {.help = "PyTorch script to run; empty: tools/bench/peers/torch_gpt.py; the scripts of "
                     "checkpoint and tokenize lie next to it"});
  flags.add("bench.tokenizer", &config.tokenizer,
            {.help = "folder with the tokenizer.json that the part tokenize times"});
  flags.add("bench.jsonl", &config.jsonl, {.help = "file of one JSON line a row; empty: none"});
  if (!flags.parse(argc, argv, std::cout)) return;
  const std::set<std::string> wanted = wanted_parts(config.parts, parts);
  // A bare name is looked up in PATH.
  if (config.python.find('/') != std::string::npos) {
    config.python = resolve_user_path(config.python);
  }
  if (!config.tokenizer.empty()) config.tokenizer = resolve_user_path(config.tokenizer);
  config.peer =
      config.peer.empty() ? "tools/bench/peers/torch_gpt.py" : resolve_user_path(config.peer);

  if (!config.jsonl.empty()) {
    const RunFile lines{"bench.jsonl", resolve_user_path(config.jsonl)};
    std::vector<RunFile> read = {{"bench.peer", config.peer}};
    if (config.python.find('/') != std::string::npos)
      read.push_back({"bench.python", config.python});
    if (!config.tokenizer.empty()) {
      read.push_back({"bench.tokenizer", config.tokenizer + "/tokenizer.json"});
    }
    if (!flags.config_path().empty()) read.push_back({"config", flags.config_path()});
    check_files_differ(std::span(&lines, 1), read);
  }
  check_used(flags, parts, wanted);
  choose_cpu_by_environment();
  engine::require(!flags.is_given("bench.peer") || !config.python.empty(),
                  "[bench] expected bench.python with bench.peer, got none to run it with");
  BenchReport report(resolve_user_path(config.jsonl));
  report_machine(report);
  for (const BenchPart& part : parts) {
    if (wanted.contains(part.name)) part.run(config, report);
  }
  engine::require(report.num_rows() > 1,
                  "[bench] expected bench.rows to be part of a row's name, got '{}'", config.rows);
}

}  // namespace tessera::tools
