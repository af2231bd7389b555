#include "tools/config/log_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "engine/error.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {

using engine::require;

namespace {

// FIRST:LAST, of `steps` steps; those after `start`.
StepRange parse_steps(const std::string& text, std::int64_t steps, std::int64_t start,
                      const char* option) {
  StepRange range;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, range.first);
  const bool has_colon = first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  const auto last = std::from_chars(has_colon ? first.ptr + 1 : end, end, range.last);
  require(has_colon && last.ec == std::errc() && last.ptr == end && range.first >= 1 &&
              range.first <= range.last && range.last <= steps,
          "[config] expected auto or FIRST:LAST from 1:1 to {0}:{0} (train.steps={0}), got '{1}' "
          "({2})",
          steps, text, option);
  range.first = std::max(range.first, start + 1);
  return range;
}

}  // namespace

std::string why_none_of(const StepRange& steps, std::int64_t start) {
  if (steps.first <= steps.last) {
    return fmt::format("the run ended before the end of step {}", steps.first);
  }
  if (start == 0) return "the run has no step";
  return fmt::format("the run went on after step {} and the steps to record end with {}", start,
                     steps.last);
}

void LogConfig::add_to(FlagSet& flags) {
  flags.add("log.every", &every,
            {.help = "steps between lines on the terminal; 0: none", .min = 0});
  flags.add("log.val_every", &val_every,
            {.help = "steps between validations; 0: at the end only", .min = 0});
  flags.add(
      "log.jsonl", &jsonl,
      {.help =
           "file of one JSON line a step, numbered from 1; empty: log.jsonl in the output folder"});
  flags.add("log.trace", &trace,
            {.help = "file for a trace of what ran when on all ranks, which ui.perfetto.dev opens; "
                     "with plan of the planned steps, in simulated time; empty: none"});
  flags.add("log.trace_steps", &trace_steps,
            {.help = "steps that the trace shows, as FIRST:LAST, numbered from 1; auto: the third "
                     "to the fifth that this process makes, or the last ones of a shorter run; "
                     "not with plan, whose steps are all shown"});
  flags.add("log.probe", &probe,
            {.help = "file for checksums of parameters, activations and gradients of all ranks, "
                     "which compare --find-divergence reads; empty: none"});
  flags.add("log.probe_steps", &probe_steps,
            {.help = "steps that have checksums, as FIRST:LAST, numbered from 1; auto: all"});
  flags.add("log.probe_values", &probe_values,
            {.help = "instead of all checksums the values of one tensor, as "
                     "PHASE:MICRO_BATCH:VISIT:TENSOR; the run ends with the last of "
                     "log.probe_steps; empty: none"});
  flags.add("log.tensorboard", &tensorboard,
            {.help = "folder for a file of scalars that TensorBoard shows, made if need be; empty: "
                     "none"});
  flags.add(
      "log.peak_ms", &peak_ms,
      {.help = "how long the ranks multiply matrices before the first step, on the CPU, to know "
               "the peak that a step's rate is part of: three times, of which the best counts; 0: "
               "not at all",
       .min = 0,
       .max = 10'000});
}

void LogConfig::validate(std::int64_t steps) const {
  require(!trace.empty() || trace_steps == "auto",
          "[config] expected log.trace_steps with log.trace only, got {} without", trace_steps);
  static_cast<void>(traced(steps));  // throws
  require(!probe.empty() || (probe_steps == "auto" && probe_values.empty()),
          "[config] expected {0} with log.probe only, got {1} without",
          probe_values.empty() ? "log.probe_steps" : "log.probe_values",
          probe_values.empty() ? probe_steps : probe_values);
  static_cast<void>(probed(steps));
  if (!probe_values.empty()) static_cast<void>(parse_target(probe_values));
}

StepRange LogConfig::traced(std::int64_t steps, std::int64_t start) const {
  if (trace_steps != "auto") {
    return parse_steps(trace_steps, steps, start, "log.trace_steps");
  }
  // With the last of probe_steps a run ends that is after values.
  const std::int64_t last = probe_values.empty() ? steps : probed(steps).last;
  return {std::max(start + 1, std::min(start + 3, last)), std::min(start + 5, last)};
}

StepRange LogConfig::probed(std::int64_t steps, std::int64_t start) const {
  if (probe_steps != "auto") {
    return parse_steps(probe_steps, steps, start, "log.probe_steps");
  }
  return {start + 1, steps};
}

}  // namespace tessera::tools
