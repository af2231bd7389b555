// How tests steer and inspect the emulated device. Nothing of it exists on a real one.
//
// Programs that a test starts are steered by the environment variable CUDA_EMULATION,
// comma separated, e.g.
// "devices=4,host=1,seed=3,permutation=2,memory=1000000,pinned=1000000,queue=64,capability=80,
// fail_malloc=0@5,fail_launch=1@12,waits=FILE,remove=rank0#17/rank0.2@45" (see Settings, fail_*,
// waits, remove_wait).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::cuda_emulation {

struct Settings {
  int num_devices = 8;                 ///< at most 16
  int host = 0;                        ///< processes with another number have other devices
  std::uint64_t delay_seed = 0;        ///< not 0: random 0..300 us before work on streams
  std::uint64_t permutation_seed = 1;  ///< order of a block's threads; 0: natural
  std::size_t memory_nbytes = std::size_t{8} << 30;  ///< of each device
  std::size_t pinned_nbytes = std::size_t{8} << 30;  ///< page-locked memory of the host
  /// Tasks that the queue of a stream has room for, as a real one has for about a thousand. Whoever
  /// finds it full waits, and has the lock of the device's context meanwhile, which all calls take
  /// but those that ask which device is current: so it was seen on an H100.
  int queue_size = 1024;
  int compute_capability = 90;  ///< what it says of itself
};

Settings settings();
void configure(const Settings& settings);
/// As in a new process: settings of the environment, no sticky errors, no faults planned, nothing
/// counted or removed. Streams, events, memory, peer access and attributes of kernels
/// stay.
void reset();

// Faults on demand.

/// The nth (1: the next) cudaMalloc on `device` from now and the `count - 1` after it fail with
/// cudaErrorMemoryAllocation.
void fail_malloc(int device, int nth, int count = 1);
/// The nth (1: the next) allocation of page-locked memory of the host from now, by threads whose
/// device is `device`, and the `count - 1` after it fail.
void fail_pinned(int device, int nth, int count = 1);
/// The nth kernel launch on `device` from now fails when it runs, with cudaErrorLaunchFailure:
/// sticky, later work of the device is skipped and later calls fail.
void fail_launch(int device, int nth);

// Counts.

/// What exists now, in the whole process.
struct Live {
  std::int64_t allocations = 0;  ///< of device memory
  std::int64_t allocated_nbytes = 0;
  std::int64_t pinned = 0;  ///< allocations of page-locked memory
  std::int64_t pinned_nbytes = 0;
  std::int64_t streams = 0;
  std::int64_t events = 0;
  std::int64_t graphs = 0;  ///< and those that can be launched
  bool operator==(const Live&) const = default;
};
Live live();

/// What was called since start_counting() or reset(), in the whole process; for a capture as well.
struct Calls {
  std::int64_t launches = 0;        ///< kernels and work of emulated libraries
  std::int64_t copies = 0;          ///< copies and fills
  std::int64_t mallocs = 0;         ///< cudaMalloc, cudaMallocHost
  std::int64_t blocking = 0;        ///< calls that block the host: synchronise, copies to pageable
                                    ///< memory, cudaFree
  std::int64_t set_devices = 0;     ///< cudaSetDevice
  std::int64_t set_attributes = 0;  ///< cudaFuncSetAttribute, of shared memory
  std::int64_t timed_events = 0;    ///< events with times, made
  std::int64_t timed_records = 0;   ///< of those
  std::int64_t graph_launches = 0;  ///< what they run is not counted
  std::int64_t removed_waits = 0;   ///< waits that remove_wait took away
};
Calls calls();
/// Of Calls::blocking those of each thread, by the name that it had then (see waits). "": not
/// named.
std::map<std::string, std::int64_t> blocking_calls();

/// The devices that got a context of this process since reset(): by cudaSetDevice, or by a call in
/// a thread whose current device they were, as all are that need one. On a real device a context
/// takes some hundred MB.
std::vector<int> contexts();

// Waits.
// [Note: waits]
// Each cudaStreamWaitEvent, cudaEventSynchronize and cudaStreamSynchronize is a wait, numbered from
// 1 in its host thread, so that numbers are equal from run to run however rank threads interleave.
// Threads are named by label_thread, else "device<d>" by their first cudaSetDevice, else
// "thread<n>"; a stream is named "<creating thread>.<n>" by its order of creation in that thread,
// its tasks (kernels, copies, fills, host functions; not records and waits) are numbered from 1.
// start_counting() starts all numbers again; streams made earlier keep their names, which new ones
// then repeat: make all of them after it, or all before.
//
// Vector clocks, one for each stream and host thread with a component for each stream, follow
// launches, records and waits. A wait is redundant if the waiter's clock had already reached the
// event's. What host threads tell each other by locks and what collectives order between ranks is
// not followed: a wait that only these make redundant counts as needed.

enum class WaitKind { kStreamWaitEvent, kEventSynchronize, kStreamSynchronize };

/// Work that a wait is the first to cover: the tasks of `stream` from number `task` on.
struct Covered {
  std::string stream;
  int task = 0;
  bool operator==(const Covered&) const = default;
};

struct Wait {
  std::string thread = {};  ///< that called
  int ordinal = 0;          ///< in that thread, from 1
  WaitKind kind = WaitKind::kStreamWaitEvent;
  std::string waiter = {};    ///< the stream, or the thread, that waits
  std::string recorded = {};  ///< stream of the event; empty: never recorded
  int task = 0;               ///< last task of that stream before the event
  bool redundant = false;
  /// A later wait of the same stream covers all that this one does, and between them the stream was
  /// given no work and nobody asked for its state: taken away alone, nothing changes.
  bool superseded = false;
  std::vector<Covered> covered = {};  ///< empty if redundant

  /// "thread#ordinal/stream@task/..." as the environment's `remove=` takes it.
  std::string text() const;
};

/// Names the calling thread and starts its numbers again.
void label_thread(const std::string& label);
/// Starts all numbers again and begins to account for waits. None is removed any more.
void start_counting();
/// All waits since start_counting(), by thread and ordinal.
std::vector<Wait> waits();

inline constexpr double kRemovalDelayMs = 10;

/// From now on the wait of this thread and ordinal does nothing, and the work it covers is late:
/// each covered stream holds its first covered task until the waiter has gone on (a host thread),
/// or has run its next task (a stream), or 10 times `delay_ms` are over; and `delay_ms` longer.
/// Numbers start again.
void remove_wait(const Wait& wait, double delay_ms = kRemovalDelayMs);
void remove_wait(const std::string& text, double delay_ms = kRemovalDelayMs);

/// What the last failed kernel or library call on a device said; empty if none since reset().
std::string fault(int device);

}  // namespace tessera::cuda_emulation
