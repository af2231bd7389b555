// Threads that play the processes of a job, over a transport between threads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/hybrid/hybrid_group.h"
#include "comm/messages/message_world.h"
#include "comm/process_group.h"
#include "comm/world/world.h"
#include "tests/comm/memory_transport.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {

/// Stands for the control plane: carries the first failure of a world to the others, and knows who
/// has left.
class MessageJob {
 public:
  /// `num_ranks`: of each process.
  MessageJob(const std::vector<int>& num_ranks, std::chrono::milliseconds deadline)
      : MessageJob(MemoryTransport::make(static_cast<int>(num_ranks.size())), num_ranks, deadline) {
  }
  MessageJob(std::vector<std::unique_ptr<Transport>> transports, const std::vector<int>& num_ranks,
             std::chrono::milliseconds deadline)
      : num_left_(transports.size()) {
    std::vector<int> process_of;
    for (std::size_t p = 0; p < num_ranks.size(); ++p) {
      process_of.insert(process_of.end(), std::size_t(num_ranks[p]), int(p));
    }
    for (auto& transport : transports) {
      auto world = std::make_shared<MessageWorld>();
      world->world = std::make_shared<World>(
          deadline, [this](const std::string& m) { fail(m); }, nullptr, kPatience);
      world->transport = std::move(transport);
      world->process_of = process_of;
      world->peers.has_left = [this, num_ranks](int process) {
        return num_left_[std::size_t(process)].load() == num_ranks[std::size_t(process)];
      };
      worlds_.push_back(std::move(world));
    }
    carrier_ = std::thread([this] { carry(); });
  }
  ~MessageJob() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    carrier_.join();
  }
  MessageJob(const MessageJob&) = delete;
  MessageJob& operator=(const MessageJob&) = delete;

  /// Of process `process`.
  MessageWorld& world(int process) { return *worlds_[std::size_t(process)]; }

  /// Runs `fn` on a thread a rank.
  void run(const std::function<void(ProcessGroup&)>& fn) {
    std::vector<std::jthread> threads;
    for (std::size_t p = 0; p < worlds_.size(); ++p) {
      for (auto& group : make_hybrid_groups(worlds_[p])) {
        threads.emplace_back([this, p, &fn, group = std::move(group)]() mutable {
          fn(*group);
          group.reset();
          ++num_left_[p];
        });
      }
    }
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{1000};

  void fail(const std::string& message) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = message;
    }
    changed_.notify_all();
  }

  void carry() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !failure_.empty(); });
    lock.unlock();
    if (failure_.empty()) return;
    for (const auto& world : worlds_) world->world->abort(failure_);
  }

  std::vector<std::shared_ptr<MessageWorld>> worlds_;
  std::vector<std::atomic<int>> num_left_;  // ranks, by process
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  bool ended_ = false;
  std::thread carrier_;
};

/// What `fn` throws as CommError on each rank of processes that have `num_ranks`; empty: nothing.
inline std::vector<std::string> errors_of_job(
    const std::vector<int>& num_ranks, const std::function<void(ProcessGroup&)>& fn,
    std::chrono::milliseconds deadline = std::chrono::hours(1)) {
  int size = 0;
  for (const int n : num_ranks) size += n;
  return said_by_threads(
      size,
      [&](ProcessGroup& group) -> std::string {
        try {
          fn(group);
          return "";
        } catch (const CommError& error) {
          return error.what();
        }
      },
      [&](const auto& each) { MessageJob(num_ranks, deadline).run(each); });
}

}  // namespace tessera::comm
