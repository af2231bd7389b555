// The parts of the emulated runtime among themselves. Everything here is called Unseen (edges.h),
// except where a comment says otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/emulator/control.h"

namespace tessera::cuda_emulation {

inline constexpr int kMaxDevices = 16;

/// Per stream, by uid: the last task that has happened before. Absent: none.
using Clock = std::vector<int>;

class Capture;
struct GraphContent;
struct GraphExec;

/// One cudaEventRecord. `done` is set by the recorded stream's worker.
struct Record {
  std::atomic<int> done{0};
  std::int64_t time_ns = 0;
  int device = 0;
  // As accounted for when it was recorded:
  std::string stream;
  int task = 0;
  int generation = -1;  ///< of counting; -1: not accounted
  Clock clock = {};
  // Of a capturing stream, whose `clock` counts the streams of the capture:
  std::shared_ptr<Capture> capture = nullptr;
  std::size_t in_capture = 0;  ///< number

  /// Blocks until done. Gives no edge.
  void block() const { done.wait(0); }
};

/// What remove_wait asked for. Tasks that the wait covers are held until the waiter has overtaken
/// them, for it is of no use to be late before the waiter has come.
struct Removal {
  std::string thread = {};
  int ordinal = 0;
  std::set<std::pair<std::string, int>> covered = {};  ///< (stream, first task)
  double delay_ms = 0;
  std::atomic<bool> overtaken{false};  ///< the host went on, or the stream ran its next work
};

struct Task {
  enum class Kind { kWork, kRecord, kWait, kQuit };
  Kind kind = Kind::kWork;
  std::string name = {};
  std::function<void()> run = {};
  std::shared_ptr<Record> record = nullptr;
  std::uint64_t number = 0;  ///< of the stream's tasks of any kind, for random delays
  Removal* held_by = nullptr;
  Removal* overtakes = nullptr;
  bool runs_always = false;  ///< when the device is broken, too
};

/// A queue and its worker thread. The worker owns a reference and ends after quit().
class Stream {
 public:
  /// `is_accounted`: its tasks count in the account of waits.
  static std::shared_ptr<Stream> start(int device, std::string label, int priority,
                                       bool is_accounted = true);

  /// `fn` is called, seen, by the worker.
  void push_work(std::string name, std::function<void()> fn);
  /// push_work() of what is called when the device is broken, too. Not in a capture.
  void push_callback(std::function<void()> fn);
  std::shared_ptr<Record> push_record();
  void push_wait(std::shared_ptr<Record> record);
  void quit();
  /// The next work is what a removed wait should have held up.
  void overtake(Removal& removal);
  /// Whether all that was pushed has run; if so, gives the edge from it.
  bool idle();
  /// Null: work runs. Otherwise the capture gets it; records and waits are its own (capture.h).
  std::shared_ptr<Capture> capture() const;
  void set_capture(std::shared_ptr<Capture> capture);

  const int uid;
  const int device;
  const std::string label;
  const int priority;
  const bool is_accounted;

  // Guarded by the account's mutex:
  Clock clock = {};
  int clock_generation = -1;

 private:
  Stream(int uid, int device, std::string label, int priority, bool is_accounted)
      : uid(uid),
        device(device),
        label(std::move(label)),
        priority(priority),
        is_accounted(is_accounted) {}
  void push(std::unique_ptr<Task> task);
  void work();
  void run(Task& task);

  mutable std::mutex mutex_;
  std::shared_ptr<Capture> capture_;
  std::condition_variable filled_;
  std::condition_variable popped_;
  std::deque<std::unique_ptr<Task>> tasks_;
  bool busy_ = false;
  bool ended_ = false;  ///< after quit(), when nothing is left
  std::uint64_t num_pushed_ = 0;
  int num_work_ = 0;  ///< since start_counting
  int generation_ = -1;
  Removal* overtakes_ = nullptr;
  char done_edge_ = 0;
};

struct EventObject {
  int device = 0;
  unsigned flags = 0;
  bool has_times() const { return (flags & cudaEventDisableTiming) == 0; }
  std::mutex mutex = {};
  std::shared_ptr<Record> last = nullptr;
};

/// Calls that are to fail: the nth from now, and those after it.
struct PlannedFaults {
  std::atomic<int> countdown{0};  ///< 0: none
  std::atomic<int> count{0};      ///< from then on; at most 1: that call alone

  void plan(int nth, int num) {
    count.store(num);
    countdown.store(nth);
  }
  /// Of one call.
  bool fails() {
    if (countdown.load() <= 0 || countdown.fetch_sub(1) != 1) return false;
    if (count.fetch_sub(1) > 1) countdown.store(1);
    return true;
  }
};

struct Device {
  std::atomic<int> sticky{0};  ///< a cudaError_t
  std::atomic<bool> has_context{false};
  std::atomic<std::size_t> used_nbytes{0};
  std::mutex context_lock;  ///< before all others; see Settings::queue_size
  PlannedFaults mallocs, pinned_mallocs, launches;
  std::array<std::atomic<bool>, kMaxDevices> peer_enabled{};
  std::string fault = {};                             ///< guarded by Runtime::mutex
  std::shared_ptr<Stream> null_stream = nullptr;      ///< guarded by Runtime::mutex
  std::map<const void*, int> max_shared_nbytes = {};  ///< by kernel; guarded by Runtime::mutex
};

struct Counters {
  std::atomic<std::int64_t> allocations{0}, allocated_nbytes{0}, pinned{0}, pinned_nbytes{0},
      streams{0}, events{0}, graphs{0};
  std::atomic<std::int64_t> launches{0}, copies{0}, mallocs{0}, set_devices{0}, set_attributes{0},
      timed_events{0}, timed_records{0}, graph_launches{0}, removed_waits{0};
};

/// The state of the emulated machine. Lives until the process ends.
struct Runtime {
  std::atomic<int> num_devices{8}, host{0};
  std::atomic<std::uint64_t> delay_seed{0};
  std::atomic<std::uint64_t> permutation_seed{1};
  std::atomic<std::size_t> memory_nbytes{0};
  std::atomic<std::size_t> pinned_nbytes{0};
  std::atomic<int> queue_size{0};
  std::atomic<int> compute_capability{0};
  std::atomic<int> generation{0};  ///< of numbers: start_counting, reset and remove_wait begin one
  std::atomic<bool> counting{false};
  std::atomic<Removal*> removal{nullptr};
  Counters counters;
  std::array<Device, kMaxDevices> devices;

  std::mutex mutex;
  std::unordered_map<cudaStream_t, std::shared_ptr<Stream>> streams;
  std::unordered_map<cudaEvent_t, std::shared_ptr<EventObject>> events;
  std::unordered_map<cudaGraph_t, std::shared_ptr<const GraphContent>> graphs;
  std::unordered_map<cudaGraphExec_t, std::shared_ptr<GraphExec>> graph_execs;
  std::uint64_t num_handles = 0;
  std::vector<std::unique_ptr<Removal>> removals;
  std::set<std::string> labels;  ///< of host threads alive
  int num_unlabelled = 0;
  std::map<std::string, std::int64_t> blocking;  ///< calls; see blocking_calls
};
Runtime& runtime();

/// Handles are never used twice, so that a stale one is always found out. Under Runtime::mutex.
inline std::uint64_t new_handle(Runtime& machine, std::uint64_t kind) {
  return (kind << 48) + 16 * ++machine.num_handles;
}

/// A host thread.
struct HostThread {
  HostThread() = default;
  HostThread(const HostThread&) = delete;
  HostThread& operator=(const HostThread&) = delete;
  ~HostThread();
  /// `wanted`, or "wanted-2" and so on if another living thread has it. Its numbers start again.
  void set_label(const std::string& wanted);

  std::string label;  ///< empty: none yet
  int device = 0;
  bool has_context = false;  ///< of `device`
  bool in_host_function = false;
  const char* illegal_address = nullptr;  ///< what is wrong with the arguments of the next launch
  cudaError_t last_error = cudaSuccess;
  int generation = -1;
  int num_waits = 0;
  int num_streams = 0;
  Clock clock = {};
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::vector<std::shared_ptr<Capture>> captures;  ///< begun in this thread
};
/// The calling thread.
HostThread& host_thread();
/// The calling thread, with a label and with numbers of the present generation.
HostThread& named_host_thread();
/// A call of this thread that blocks it.
void count_blocking();

/// The work in progress in this thread, for messages; null outside work.
struct Work {
  const char* task = nullptr;
  const char* stream = nullptr;
};
Work& current_work();

/// Remembers `error` as the calling thread's last. Returns it.
cudaError_t failed(cudaError_t error);
/// The error that any call on `device` gives now: no such device, sticky, called from a host
/// function. Sets the last error. The thread's current device has a context from then on.
cudaError_t entry_error(int device);
/// entry_error() for libraries, which make the device current themselves.
cudaError_t device_error(int device);
inline cudaError_t entry_error() { return entry_error(host_thread().device); }
/// The error with which a wait of the host for `device` does not begin. A sticky one is told after
/// the wait: the device skips what it has not begun, and the host learns of a fault when nothing
/// runs there any more.
cudaError_t wait_error(int device);
/// Breaks `device`: prints and keeps `what`.
void break_device(int device, cudaError_t error, const std::string& what);

/// Null, with the last error set, for a handle that is not live. The null stream is refused.
std::shared_ptr<Stream> find_stream(cudaStream_t handle);
/// The stream of cudaMemcpy and cudaMemset, which no stream made by the caller waits for.
std::shared_ptr<Stream> null_stream(int device);
/// The streams of a device.
std::vector<std::shared_ptr<Stream>> streams_of(int device);
/// Waits for everything that `stream` holds. Gives the edge and moves the host's clock.
void block_on(Stream& stream);

/// A graph's new handle.
cudaGraph_t add_graph(std::shared_ptr<const GraphContent> content);

std::uint64_t mix(std::uint64_t seed, std::uint64_t value);

// The account of waits (account.cc). All do nothing unless counting.
void account_work(Stream& stream, int task);
void account_record(Stream& stream, Record& record, int task);
/// The host has seen `record` done by other means than a wait.
void account_reached(const Record& record);
/// Counts one wait, always; `stream` null: the host waits; `record` null: never recorded. Returns
/// whether the wait was removed.
bool account_wait(WaitKind kind, Stream* stream, const Record* record);

}  // namespace tessera::cuda_emulation
