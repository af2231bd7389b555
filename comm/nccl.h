// Ranks that have a GPU each, over NCCL: threads of one process, processes, or threads of several.
//
//   run_nccl_ranks(2, {}, [](ProcessGroup& world) { ... });   // one thread and one GPU a rank
//   const ControlOptions control{.process = 1, .num_processes = 2, .address = "tcp:h1:29500",
//                                .secret = "..."};
//   auto world = join_nccl(control, 0);                       // this process's rank, on cuda:0
//   run_joined_nccl_ranks(control, {.gpus = {0, 1}}, [](ProcessGroup& world) { ... });  // its two
//
// NCCL is loaded when the first world is made. Collectives lie on CUDA streams of the rank's GPU.
//
// [Note: NCCL and the order of sums] With `canonical` a reduction sends each part to the rank that
// sums it (ncclSend, ncclRecv), which folds them in rank order: exactly the bits of the CPU's
// ranks. Without, NCCL reduces as it likes, in the dtype of the inputs, and that sum is then
// widened and added to the running one in f32. With u = 2^-24 for f32 inputs and 2^-8 for bf16, the
// sums of N <= 256 ranks lie within 2 (N - 1) u sum|x| of the canonical ones; with Accumulate::kYes
// within 2 N 2^-24 (|start| + sum|x|) more. So fast bf16 sums are those of bf16 training elsewhere,
// and give up what the canonical ones keep; whoever wants neither the order nor that loss reduces
// f32. All ranks get the same bits of an all_reduce in both. Canonical is not slower as such:
// between GPUs that see each other it moves the same bytes, but in N^2 messages, and an all_reduce
// returns f32 sums, so of bf16 it moves 1.5 times as many. It needs memory for one whole input;
// fast needs it for one output in the inputs' dtype, and none for f32 without a running sum.
//
// [Note: how a world of NCCL ends] A thread of the world polls its communicators: for errors, and
// for calls that take longer than the deadline since their stream came to them. The first failure
// aborts all of the process's communicators, so that streams end; see [Note: failures on a GPU
// stream]. Thread ranks of one process also compare each call as it is made, as comm:threads, and
// know who is missing. Ranks of several, threads or not, compare a running hash of their calls in
// agree() and barrier(), and what each called last, which the control plane tells all of them: see
// comm/processes/process_rank.h. It also tells of failures, and of processes that are lost: NCCL
// itself may never notice, or say no more than that something has gone.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/control.h"
#include "comm/flight_recorder.h"
#include "comm/process_group.h"

namespace tessera::comm {

struct NcclOptions {
  /// How long ranks wait for each other: to join, in one collective, in a host call.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  /// As in ThreadsOptions, both.
  std::function<void(const std::string& message)> on_failure = {};
  std::shared_ptr<FlightRecorder> flight = {};
  bool canonical = true;          ///< see [Note: NCCL and the order of sums]
  std::string library_path = "";  ///< empty: this process's NCCL, else libnccl.so.2
  /// Of this process's ranks, in their order. Empty, where it has all ranks: GPU r for rank r.
  std::vector<int> gpus = {};
};

/// The version of the NCCL that would be used, as "2.22.3". Throws DeviceError without one that can
/// be used.
std::string nccl_version(const std::string& library_path = "");

/// `size` groups that are ranks 0..size-1 of one world, each used by one thread. Throws
/// InvalidArgument for a size < 1, too few GPUs or one twice; DeviceError without NCCL; CommError.
std::vector<std::unique_ptr<ProcessGroup>> make_nccl_world(int size, NcclOptions options);

/// As run_ranks() in threads.h.
void run_nccl_ranks(int size, NcclOptions options, const std::function<void(ProcessGroup&)>& fn);

/// This process's rank of a world in which rank r is process r, with a GPU of its own: `gpu` of
/// those that the process sees. `control`: which process this is, and where they meet. A failure of
/// one ends all, with the same message; a process that is lost is one. Collective; so is the end of
/// the group, which waits for what is enqueued. Groups of one world end in the same order on all
/// ranks. The end of the last one leaves the world: whoever still waits for this rank is told.
/// Throws as make_nccl_world() and Control::join() do, which the others are told; CommError where
/// processes have other versions of NCCL.
std::unique_ptr<ProcessGroup> join_nccl(const ControlOptions& control, int gpu,
                                        NcclOptions options = {});

/// As join_nccl(), of a world in which each process has a rank for each of its options.gpus, of
/// which all have as many: rank t of the result is rank t + gpus.size() * process of the world.
/// Each is used by one thread; of one that leaves, the others are told as of a process. Throws
/// InvalidArgument also for no GPU, and where a process has another number of them.
std::vector<std::unique_ptr<ProcessGroup>> join_nccl_ranks(const ControlOptions& control,
                                                           NcclOptions options);

/// join_nccl_ranks(), and then `fn` on a thread a rank; ends as run_ranks() in threads.h does.
void run_joined_nccl_ranks(const ControlOptions& control, NcclOptions options,
                           const std::function<void(ProcessGroup&)>& fn);

}  // namespace tessera::comm
