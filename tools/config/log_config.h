// The options of what is told and recorded of a training: --log.*.
#pragma once

#include <cstdint>
#include <string>

#include "tools/cli/flags.h"

namespace tessera::tools {

/// First and last, from 1; none if `last` is smaller.
struct StepRange {
  std::int64_t first = 1, last = 0;
};

/// "the run ended before the end of step 3": why a process that went on after step `start`
/// has recorded none of `steps`, as LogConfig says them.
std::string why_none_of(const StepRange& steps, std::int64_t start);

struct LogConfig {
  std::int64_t every = 10;     ///< steps between lines on the terminal; 0: none
  std::int64_t val_every = 0;  ///< steps between validations; 0: at the end only
  std::string jsonl;           ///< empty: log.jsonl in the output folder
  std::string trace;           ///< file; empty: none
  std::string trace_steps = "auto";
  std::string probe;                 ///< file; empty: none
  std::string probe_steps = "auto";  ///< auto: every step
  std::string probe_values;          ///< what to keep whole; empty: nothing
  std::string tensorboard;           ///< a folder; empty: none
  std::int64_t peak_ms = 50;         ///< to measure the peak of matrix products; 0: not at all

  void add_to(FlagSet& flags);
  /// For a run of `steps` steps. Throws InvalidArgument for what would have no effect, and for
  /// steps that the run does not have.
  void validate(std::int64_t steps) const;
  /// What trace_steps says to a process that goes on after step `start`: of the steps that it names
  /// those after `start`.
  StepRange traced(std::int64_t steps, std::int64_t start = 0) const;
  /// What probe_steps says to a process that goes on after step `start`; see traced().
  StepRange probed(std::int64_t steps, std::int64_t start = 0) const;
};

}  // namespace tessera::tools
