// What backends share whose ranks are threads of one process.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/process_group.h"
#include "comm/threads/rendezvous.h"

namespace tessera::comm {

/// One rank of a group of threads: its calls, and how it leaves, whatever moves the tensors.
class ThreadRank {
 public:
  enum class Kind { kWorld, kSplit };

  ThreadRank(std::shared_ptr<Rendezvous> group, int rank, Kind kind)
      : group_(std::move(group)), rank_(rank), kind_(kind) {}
  /// Tells the group that this rank calls no more. A part that an exception unwinds says nothing:
  /// the world will be told of the exception itself.
  ~ThreadRank();
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;

  int rank() const { return rank_; }
  int world_rank() const { return group_->world_rank(rank_); }
  const std::shared_ptr<Rendezvous>& group() const { return group_; }
  World& world() const { return *group_->world(); }

  Call next_call(const FlightCall& what, std::string text) {
    const std::int64_t sequence = sequence_++;
    return {.sequence = sequence,
            .op = what.op,
            .text = std::move(text),
            .flight = group_->record(rank_, sequence, what)};
  }
  /// As in ProcessGroup.
  void declare(std::string_view what);
  /// As ProcessGroup::barrier().
  void barrier(std::string_view label);
  /// As ProcessGroup::split(): the group, and this rank's number there.
  struct Part {
    std::shared_ptr<Rendezvous> group = nullptr;
    int rank = 0;
  };
  Part split(int color, int key);

 private:
  const std::shared_ptr<Rendezvous> group_;
  const int rank_;
  const Kind kind_;
  const int num_exceptions_ = std::uncaught_exceptions();
  std::int64_t sequence_ = 0;
};

/// The group of all ranks of a new world.
std::shared_ptr<Rendezvous> make_world(int size, std::chrono::milliseconds deadline,
                                       std::function<void(const std::string& message)> on_failure,
                                       std::shared_ptr<FlightRecorder> flight);

/// Runs `fn` on a thread a group, and ends as run_ranks() in threads.h says.
void run_on_threads(std::vector<std::unique_ptr<ProcessGroup>> groups, World& world,
                    const std::function<void(ProcessGroup&)>& fn);

}  // namespace tessera::comm
