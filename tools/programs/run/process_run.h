// What the ranks of one process share while they train.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "engine/gemm/gemm_algorithms.h"
#include "tools/cli/flags.h"
#include "tools/launch/ranks.h"
#include "tools/programs/run/audit.h"
#include "tools/report/flight_output.h"
#include "tools/report/run_probe.h"
#include "tools/report/run_trace.h"
#include "tools/train/run_checkpoints.h"
#include "tools/train/task.h"

namespace tessera::tools {

/// What is null was not asked for.
struct ProcessRun {
  /// Of a prepared task. What is referred to outlives this. Throws for files that cannot be
  /// written or read.
  ProcessRun(const Ranks& ranks, const Task& task, const FlagSet& flags,
             const FlightOutput& flight);

  /// For checkpoints. Of a run without any nobody asks.
  RunIdentity identity() const;
  /// See arithmetic_text().
  std::string arithmetic() const;
  /// What all processes of a run must have in common: see difference_of_processes().
  std::string text() const;
  /// The run has failed: keeps the files of what led to it.
  void keep() noexcept;

  const Ranks& ranks;
  const Task& task;
  const std::string config_toml;
  const FlightOutput& flight;
  const std::string data_digest;
  const std::string files;  ///< what a process has read besides, with several; else empty
  const std::string gpu;    ///< gpu_text(), or empty where nobody asks
  const std::unique_ptr<RunTrace> trace;
  const std::unique_ptr<RunProbe> probe;
  const std::unique_ptr<Audits> audits;
  std::shared_ptr<engine::GemmAlgorithms> gemms = {};  ///< chosen before ranks compute
  std::once_flag has_gemms = {};                       ///< of ranks, each of which is told of them
};

}  // namespace tessera::tools
