// One step as it was: what the log, the terminal and the summary tell of it.
//
// [Note: the parts of a step]
// On the CPU the host does the work itself, so the parts are times of rank 0's thread, and what
// they leave of step_ms is the rest: starting and ending the step, and the norm of the gradient.
// What the thread waited for collectives counts as exposed communication, wherever that was, and as
// nothing else. So does all time from when the rank has done its part of a step until it has the
// losses of all ranks: there is nothing else to do, also while the system gives its core to a rank
// that is slower, which is no wait that the thread could see. Work beside the thread, such as
// updates beside backward, takes part only as time that the thread waited for it; then the
// optimizer's own time is not known. On a GPU the host runs ahead and waits for nothing, so how
// long its thread spent where says nothing of the GPU: only the waits for collectives are known,
// from events, and the loader's time is the host's, which the GPU may never have noticed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "comm/process_group.h"
#include "engine/memory.h"

namespace tessera::tools {

struct StepRecord {
  std::int64_t step = 0;  ///< from 1
  double loss = 0;        ///< mean over the global batch, before the update
  float grad_norm = 0;    ///< of the mean gradient, before clipping
  double lr = 0;
  double step_ms = 0;
  double items_per_s = 0;                   ///< tokens, or samples
  double exposed_comm_ms = 0;               ///< compute waiting for collectives
  double data_ms = 0;                       ///< the loop waiting for the loader
  std::optional<double> compute_ms = {};    ///< forward and backward; unknown on a GPU
  std::optional<double> optimizer_ms = {};  ///< unknown on a GPU, and of updates beside backward
  engine::MemoryStats memory = {};          ///< peaks since the start
  std::optional<engine::MemoryStats> host_memory = {};  ///< of what is offloaded
  engine::MemoryStats step_memory = {};                 ///< peaks inside this step alone
  engine::MemoryStats step_host_memory = {};
  comm::Traffic traffic = {};  ///< of this rank in this step
  std::string replayed = {};   ///< what came of making the step again; empty: it was not
  std::string skipped = {};    ///< whose gradient is not finite: no norm, no update; empty: none's

  /// What the known parts leave of step_ms; nothing unless compute_ms is known.
  std::optional<double> other_ms() const {
    if (!compute_ms) return std::nullopt;
    return step_ms - exposed_comm_ms - data_ms - *compute_ms - optimizer_ms.value_or(0);
  }
};

}  // namespace tessera::tools
