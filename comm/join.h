// Ranks in several processes, on this host or on several: one call joins them.
//
//   auto world = comm::join({
//       .control = {.process = 1, .num_processes = 2, .address = "tcp:h1:29500", .secret = "..."},
//       .transport = [](const auto& all_gather) {
//         return comm::make_gloo_transport({.process = 1, .num_processes = 2,
//                                           .all_gather = all_gather});
//       },
//       .transport_name = "gloo"});
//
// What follows is as with threads: the group has the same calls, errors and bits. A process may
// have several ranks, a thread each, which share memory:
//
//   comm::run_joined_ranks(4, options, [](comm::ProcessGroup& world) { ... });
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/control.h"
#include "comm/flight_recorder.h"
#include "comm/process_group.h"
#include "comm/transport/transport.h"

namespace tessera::comm {

struct JoinOptions {
  /// Which process this is, and where they meet: with neither an address nor a hand_out over the
  /// transport, which then finds the others by itself, as MPI does.
  ControlOptions control;
  /// Makes what moves the tensors; called once, unless there is one process. Collective.
  /// `all_gather` tells all processes what it needs to know of each, and is not used later.
  std::function<std::unique_ptr<Transport>(const AllGatherTexts& all_gather)> transport;
  /// What that makes, "gloo": equal in all processes, or none of them joins.
  std::string transport_name = {};
  /// How long ranks wait for each other in one call.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  /// As in ThreadsOptions, both.
  std::function<void(const std::string& message)> on_failure = {};
  std::shared_ptr<FlightRecorder> flight = {};
};

/// This process's rank of a world in which rank r is process r. A failure of one ends all, with the
/// same message; a process that is lost is one. Collective. The end of the group leaves the world:
/// whoever still waits for this rank is told. Throws as Control::join() and the transport do, which
/// the others are told; DeviceError where no thread can be started; InvalidArgument if the
/// transport has other processes than `control` says, or another name elsewhere.
std::unique_ptr<ProcessGroup> join(const JoinOptions& options);

/// As join(), of a world in which each process has `num_threads` ranks: rank t of the result is
/// rank t + num_threads * process of the world. Each is used by one thread and its streams. What
/// they send other processes is sent once for all of them; a group that is split from them and has
/// ranks of this process alone sends nothing. The end of all of them leaves the world. Throws
/// InvalidArgument also if a process has another number of them.
std::vector<std::unique_ptr<ProcessGroup>> join_ranks(int num_threads, const JoinOptions& options);

/// join_ranks(), and then `fn` on a thread a rank; ends as run_ranks() in threads.h does.
void run_joined_ranks(int num_threads, const JoinOptions& options,
                      const std::function<void(ProcessGroup&)>& fn);

}  // namespace tessera::comm
