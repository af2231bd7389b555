#include "tools/launch/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/control/control.h"
#include "comm/nccl.h"
#include "comm/threads.h"
#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/main.h"
#include "tools/launch/cpu.h"
#include "tools/launch/processes.h"

namespace tessera::tools {

using engine::DeviceError;
using engine::require;

namespace {

// GPUs to work on; 0: the CPU.
int count_gpus(DeviceChoice device) {
  if (device == DeviceChoice::kCpu) return 0;
  const bool required = device == DeviceChoice::kCuda;
  require<DeviceError>(engine::kCudaBuilt || !required,
                       "[device] expected a build with CUDA, got one without: build where a CUDA "
                       "Toolkit is, and without NO_CUDA (device=cuda)");
  int num_gpus = 0;
  if constexpr (engine::kCudaBuilt) num_gpus = engine::cuda::num_devices();
  require<DeviceError>(num_gpus > 0 || !required,
                       "[device] expected a GPU with a driver for CUDA, got none (device=cuda)");
  return num_gpus;
}

// Ends the process when ranks have failed and one of them does not return: its thread cannot be
// ended, and whoever waits for it would never learn why. The thread and the room for the message
// are there from the start, since a failure may be that there is no memory.
class StuckRanks {
 public:
  StuckRanks(std::chrono::milliseconds deadline, FlightOutput* flight)
      : flight_(flight),
        grace_(std::clamp<std::chrono::milliseconds>(deadline, std::chrono::seconds(2),
                                                     std::chrono::minutes(1))) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      engine::fail<DeviceError>("[ranks] expected to start a thread, got {}", error.what());
    }
  }
  ~StuckRanks() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  StuckRanks(const StuckRanks&) = delete;
  StuckRanks& operator=(const StuckRanks&) = delete;

  void begin(const std::string& message) noexcept {
    {
      const std::lock_guard lock(mutex_);
      message.copy(message_.data(), message_.size() - 1);
      has_failed_ = true;
    }
    changed_.notify_all();
  }

 private:
  static void print(std::string_view kind, std::string_view message,
                    std::chrono::milliseconds patience) {
    try {
      write_to_stderr({kind, ": ", engine::escaped_lines(message), "\n"}, patience);
    } catch (const std::bad_alloc&) {
      write_to_stderr({kind, ": no memory left\n"}, patience);
    }
  }

  // Counts sleeps and not time: while the process is stopped no rank could have returned.
  bool end_within(std::chrono::milliseconds time) const {
    constexpr std::chrono::milliseconds kSleep(20);
    for (; time.count() > 0 && !ended_; time -= kSleep) std::this_thread::sleep_for(kSleep);
    return ended_;
  }

  void run() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ended_ || has_failed_; });
    }
    if (end_within(std::chrono::seconds(1))) return;
    print("warning: waiting for ranks that have not ended after", message_.data(),
          kWarningPatience);
    if (flight_ != nullptr) {
      print("warning", flight_->write(message_.data()), kWarningPatience);
    }
    if (end_within(grace_)) return;
    print("error", message_.data(), kErrorPatience);
    std::_Exit(comm::Control::tells_of_loss(message_.data()) ? kTryAgain : 1);
  }

  FlightOutput* const flight_;
  const std::chrono::milliseconds grace_;
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_failed_ = false;
  std::array<char, 4096> message_{};  // cut, and ends with a 0
  std::thread thread_;
};

// Ranks of one process, as `config` asks for them; 0: it does not.
std::int64_t asked_ranks(const ParallelConfig& p) {
  require(p.threads == 0 || p.ranks == 0 || p.threads == p.ranks,
          "[config] expected parallel.ranks={} with parallel.threads={} in one process, got {}",
          p.threads, p.threads, p.ranks);
  return std::max(p.threads, p.ranks);
}

// Ranks of each process that a launcher has started.
int threads_of(const ParallelConfig& p, const Launch& launch) {
  const auto threads = std::max<std::int64_t>(p.threads, 1);
  const std::int64_t size = threads * launch.num_processes;
  require(
      p.ranks == 0 || p.ranks == size,
      "[launch] expected parallel.ranks={}, as there are {} process{} with parallel.threads={}, "
      "got {} ({})",
      size, launch.num_processes, launch.num_processes == 1 ? "" : "es", threads, p.ranks,
      launch.str());
  return static_cast<int>(threads);
}

}  // namespace

Ranks Ranks::choose(const TrainConfig& config, const Launch& launch) {
  if (launch.by == LauncherChoice::kThreads) return on(config, count_gpus(config.device));
  const ParallelConfig& p = config.parallel;
  const int threads = threads_of(p, launch);
  if (launch.num_processes == 1) {
    TrainConfig own = config;
    own.parallel.threads = threads;
    Ranks ranks = on(own, count_gpus(config.device));
    ranks.launch = launch;
    return ranks;
  }
  const int size = launch.num_processes * threads;
  require(p.backend == BackendChoice::kAuto,
          "[launch] expected parallel.backend=auto with several processes, got another; "
          "parallel.transport says what is between them ({})",
          launch.str());
  const int num_gpus = count_gpus(config.device);
  // Those that a launcher has given to a process alone are the only ones that it sees.
  const bool are_own = num_gpus == threads;
  const int num_on_host = launch.num_local_processes * threads;
  require(num_gpus == 0 || are_own || num_gpus >= num_on_host,
          "[launch] expected a GPU for each of {} {} on this host, got {} (device=cpu keeps to the "
          "CPU; {})",
          num_on_host, threads == 1 ? "processes" : "ranks", num_gpus, launch.str());
  return {.size = size,
          .num_gpus = std::min(num_gpus, threads),
          .first_gpu = are_own ? 0 : launch.local_process * threads,
          .nccl = num_gpus > 0,
          .local = {.world_size = size,
                    .first = launch.process * threads,
                    .count = threads,
                    .num_before = launch.local_process * threads,
                    .num_on_host = num_on_host},
          .launch = launch,
          .transport = transport_of(p, launch, num_gpus > 0)};
}

Ranks Ranks::planned(const TrainConfig& config) {
  if (config.device != DeviceChoice::kCuda) return choose(config);
  const ParallelConfig& p = config.parallel;
  const int num_gpus = count_gpus(DeviceChoice::kAuto);
  const std::int64_t asked = asked_ranks(p);
  const std::int64_t num_ranks = asked > 0 ? asked : num_gpus > 0 ? num_gpus : p.cpu_ranks;
  return on(config, static_cast<int>(num_ranks));
}

Ranks Ranks::on(const TrainConfig& config, int num_gpus) {
  const ParallelConfig& p = config.parallel;
  const std::int64_t asked = asked_ranks(p);
  const int size = static_cast<int>(asked > 0 ? asked : num_gpus > 0 ? num_gpus : p.cpu_ranks);
  const bool one_each = num_gpus >= size;
  require(p.backend != BackendChoice::kNccl || one_each,
          "[config] expected a GPU for each of {} rank{}, got {} (parallel.backend=nccl)", size,
          size == 1 ? "" : "s", num_gpus);
  return {.size = size,
          .num_gpus = std::min(num_gpus, size),
          .nccl = p.backend == BackendChoice::kNccl ||
                  (p.backend == BackendChoice::kAuto && one_each && size > 1)};
}

engine::Stream Ranks::compute(int rank, const engine::StreamOptions& options) const {
  return num_gpus == 0 ? engine::Stream::inline_cpu("compute", options)
                       : engine::Stream::cuda("compute", gpu_of(rank), options);
}

void Ranks::run(const TrainConfig& config, const std::function<void(comm::ProcessGroup&)>& fn,
                FlightOutput* flight) const {
  require(are_processes() || local.are_all(),
          "[ranks] expected all {} ranks in this process, got {}", size, local.count);
  StuckRanks stuck(config.deadline(), flight);
  const auto recorder = flight == nullptr ? nullptr : flight->recorder();
  const auto on_failure = [&](const std::string& message) { stuck.begin(message); };
  // [Note: signals and generated code] The code that oneDNN generates for a product may keep
  // something else than a stack in the stack's register. A handler of a signal that interrupts it
  // then writes its frame into memory of the product. The kernel gives a signal of the process to
  // its first thread where that takes it, so ranks are other threads, if it is only one.
  if (are_processes()) {
    try {
      std::vector<int> gpus;
      for (int i = 0; i < num_gpus; ++i) gpus.push_back(first_gpu + i);
      return run_processes(config, launch, local.count, gpus, on_failure, recorder, fn);
    } catch (const engine::CommError& error) {
      if (comm::Control::tells_of_loss(error.what())) throw TryAgain(error.what());
      throw;
    }
  }
  if constexpr (engine::kCudaBuilt) {
    if (nccl) {
      return comm::run_nccl_ranks(size,
                                  {.deadline = config.deadline(),
                                   .on_failure = on_failure,
                                   .flight = recorder,
                                   .canonical = config.parallel.canonical},
                                  fn);
    }
  }
  comm::run_ranks(
      size, {.deadline = config.deadline(), .on_failure = on_failure, .flight = recorder}, fn);
}

namespace {

int num_gpus_of_all(const Ranks& ranks) {
  return ranks.are_processes() ? ranks.num_gpus * ranks.launch.num_processes : ranks.num_gpus;
}

}  // namespace

std::string_view Ranks::backend() const {
  return are_processes() ? name_of(transport) : nccl ? "nccl" : "threads";
}

std::string Ranks::launch_str() const {
  if (launch.by == LauncherChoice::kThreads) return "";
  return fmt::format("{}{}", launch.all_str(local.count),
                     are_processes() ? fmt::format(", transport {}", name_of(transport)) : "");
}

std::pair<int, std::string_view> Ranks::replica() const {
  if (!are_processes()) return {0, ""};
  if (local.count > 1) return {local.count, "process"};
  const bool has_hosts = launch.has_equal_hosts() && *launch.num_hosts > 1;
  if (has_hosts && local.num_on_host > 1) return {local.num_on_host, "host"};
  return {0, ""};
}

void Ranks::place(ParallelConfig& parallel) const {
  parallel.local_ranks = local.num_on_host;
  std::tie(parallel.replica_ranks, parallel.replica_place) = replica();
}

std::string Ranks::str() const {
  const auto count = [](int n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
  };
  return fmt::format("{}, {}{}, {}{}", num_gpus == 0 ? "cpu" : "cuda", count(size, "rank"),
                     num_gpus == 0 ? "" : " on " + count(num_gpus_of_all(*this), "GPU"), backend(),
                     num_gpus == 0 ? ", " + cpu_text() : "");
}

JsonRecord Ranks::record() const {
  JsonRecord record;
  record.add("device", num_gpus == 0 ? "cpu" : "cuda")
      .add("ranks", size)
      .add("num_gpus", num_gpus_of_all(*this))
      .add("backend", backend());
  if (num_gpus == 0) record.add("cpu", cpu_text());
  if (const std::string text = launch_str(); !text.empty()) record.add("launch", text);
  return record;
}

}  // namespace tessera::tools
