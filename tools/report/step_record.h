// One step as it was: what the log, the terminal and the summary tell of it.
//
// [Note: the parts of a step]
// Times of rank 0, on the CPU of its thread, which does the work itself, and on a GPU of the GPU,
// from events in its compute stream (engine::Stream::time()). They are disjoint, each moment
// counting once:
//   data           from asking for a batch until it is there. A GPU that has work left when the
//                  host asks notices nothing; one that ran dry waits for host, loader and copy.
//   compute        forward and backward of all micro-steps, without their waits. Of a GPU also the
//                  gaps in which it waits for the host to launch more.
//   exposed comm   waits for collectives, and for all else that other streams do, wherever they are
//                  but for data. Counts as nothing else. On the CPU also all time from when the
//                  rank has done its part of the step until it has the losses of all ranks: there
//                  is nothing else to do, also while the system gives its core to a slower rank,
//                  which is no wait that the thread could see.
//   optimizer      the update, without its waits.
//   other          what these leave of step_ms: starting and ending the step, the norm of the
//                  gradient; on a GPU what lay between steps.
// Work on other streams, such as updates during backward, takes part only as time that compute
// waited for it; then the optimizer's own time is not known. Inside a step that is a CUDA graph
// there are no events: neither compute nor optimizer is known, and exposed comm has the waits
// outside alone.
//
// step_ms: on the CPU from the start of the step until its loss and norm are known. On a GPU, which
// has the next step by then, from the end of the step before (from its own start, where a
// checkpoint or a validation lay between) to the end of its update.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "comm/process_group.h"
#include "engine/memory.h"

namespace tessera::tools {

/// StepRecord::replayed of a step that came to the same.
inline constexpr const char* kReplayedEqual = "equal";

struct StepRecord {
  std::int64_t step = 0;  ///< from 1
  double loss = 0;        ///< mean over the global batch, before the update
  float grad_norm = 0;    ///< of the mean gradient, before clipping
  double lr = 0;
  double step_ms = 0;
  double items_per_s = 0;                   ///< tokens, or samples
  double exposed_comm_ms = 0;               ///< compute waiting for collectives
  double data_ms = 0;                       ///< compute waiting for a batch
  std::optional<double> compute_ms = {};    ///< forward and backward; unknown of a graph
  std::optional<double> optimizer_ms = {};  ///< unknown of a graph, and of updates during backward
  engine::MemoryStats memory = {};          ///< peaks since the start
  std::optional<engine::MemoryStats> host_memory = {};  ///< of what is offloaded
  engine::MemoryStats step_memory = {};                 ///< peaks inside this step alone
  engine::MemoryStats step_host_memory = {};
  comm::Traffic traffic = {};  ///< of this rank in this step
  std::string replayed = {};   ///< kReplayedEqual, or what was wrong; empty: not made again
  std::string skipped = {};    ///< whose gradient is not finite: no norm, no update; empty: none's

  /// What the known parts leave of step_ms; nothing unless compute_ms is known.
  std::optional<double> other_ms() const {
    if (!compute_ms) return std::nullopt;
    return step_ms - exposed_comm_ms - data_ms - *compute_ms - optimizer_ms.value_or(0);
  }
};

}  // namespace tessera::tools
