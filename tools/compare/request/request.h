// What a person asked to compare: the options of this program, those of every training, and the
// configurations that follow from them.
//
// [Note: a process for each training] Every training is a process of train_transformer of its own,
// not a call in this one. The CPU's instruction set and matrix library are chosen once in a
// process, so one process could not sweep them; oneDNN writes its kernels, and memory is first
// touched, once in a process, so the first configuration would pay for all that follow. A training
// that runs out of memory or whose ranks get stuck ends its process, and the comparison goes on.
// And each configuration has a file that repeats it. What is known without training -
// options that do not parse, sizes that do not fit, files that are not there - is found here, with
// the trainer's own code, before the first one starts.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/run_files.h"
#include "tools/compare/request/compare_config.h"
#include "tools/compare/request/sweep.h"
#include "tools/compare/request/training_launch.h"
#include "tools/launch/ranks.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_config.h"

namespace tessera::tools {

/// The training that one row of the comparison is about.
struct Configuration {
  std::string name;
  Overrides overrides;  ///< options_of() what was asked for
  TransformerConfig config = {};
  /// What is trained: `config`, or what its memory_budget makes of it, once check_plans() has found
  /// that.
  TrainConfig fitted = {};
  ModelConfig model = {};
  Launch launch = {};  ///< of the processes that it is trained by
  int num_ranks = 1;
  int shard_ranks = 1;
  bool sums_in_rank_order = true;  ///< on this machine: not in NCCL's own order
  bool on_gpu = false;
  /// "openmpi: 1 host x 4 processes x 1 thread, transport mpi", as its log is to say; empty: one
  /// process that no launcher starts.
  std::string launch_text = {};
  std::map<std::string, std::string> options = {};  ///< in force, as JSON literals
  /// The number of an earlier one of the same plan, which is trained instead; see equal_plans.h.
  std::optional<std::size_t> same_plan_as = {};
  /// All options in force, as a file for --config, but for where a trace goes: repeating it leaves
  /// none.
  std::string toml = {};

  /// Where its ranks work; of a plan without a launcher, where they are thought to, which may be on
  /// GPUs that this machine lacks. Throws as Ranks::choose().
  Ranks ranks() const;
};

/// What a training of `c` is told besides its file, so that its trace goes to `path`; nothing if no
/// trace was asked for.
std::vector<std::string> trace_arguments(const Configuration& c, const std::string& path);

struct Request {
  CompareConfig compare;
  std::vector<Configuration> configurations;  ///< the first is the baseline
  /// The files of find_divergence, if those are records: then there are no configurations.
  std::vector<std::string> records = {};
  /// What this program and the trainings read: data, models, --config, records, and the trainer.
  std::vector<RunFile> inputs = {};

  TrainingLaunch launch = {};  ///< none unless asked for

  /// Say what every configuration would do, and train none.
  bool only_plans = false;

  /// What starts the trainings of `c`.
  LauncherWords launcher_of(const Configuration& c) const {
    return c.launch_text.empty() ? LauncherWords() : launch.words;
  }

  bool finds_divergence() const { return !compare.find_divergence.empty(); }
};

/// Reads the command line; several --sweep are one. Checks every configuration as the trainer
/// would, and that the text can be read. Nothing is written and nothing trained. Neither
/// configurations nor records: --help or --version was printed to `out`. Throws as FlagSet does,
/// and with the name of the configuration that cannot be.
Request read_request(int argc, const char* const* argv, std::ostream& out);

}  // namespace tessera::tools
