// Ranks as threads of one process: no launcher, real concurrency, real collectives.
//
//   run_ranks(4, {}, [](ProcessGroup& world) { ... });   // one thread a rank
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/process_group.h"

namespace tessera::comm {

struct ThreadsOptions {
  /// How long a rank waits for the others in one collective, on the monotonic clock.
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  /// Told once, in whichever thread, when the world fails: before its ranks have ended, which they
  /// may never do. Must not throw or call the world.
  std::function<void(const std::string& message)> on_failure = {};
  /// Keeps the last calls of each rank of this world; null: nobody does.
  std::shared_ptr<FlightRecorder> flight = {};
};

/// `size` groups that are ranks 0..size-1 of one world. Each is used by one thread and its streams.
/// Throws InvalidArgument if size < 1.
std::vector<std::unique_ptr<ProcessGroup>> make_threads_world(int size,
                                                              ThreadsOptions options = {});

/// Runs `fn` on `size` threads, one a rank, and joins them. When a rank throws, the world is
/// aborted with its message, so the others end too; then the root cause is rethrown (the first
/// error that is not an echo of the abort). A rank that returns while others still wait for it
/// counts as stopped: they get an error that names it.
void run_ranks(int size, ThreadsOptions options, const std::function<void(ProcessGroup&)>& fn);

}  // namespace tessera::comm
