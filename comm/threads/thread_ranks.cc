#include "comm/threads/thread_ranks.h"

#include <fmt/core.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

namespace tessera::comm {
namespace {

// What the ranks threw, in the order of time.
class Errors {
 public:
  void add(bool is_echo) {
    const std::lock_guard lock(mutex_);
    if (!is_echo && !root_) root_ = std::current_exception();
    if (!first_) first_ = std::current_exception();
  }
  void rethrow() const {
    if (root_ || first_) std::rethrow_exception(root_ ? root_ : first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr root_;
  std::exception_ptr first_;
};

bool is_echo(World& world, const std::exception& error) {
  return dynamic_cast<const CommError*>(&error) != nullptr && world.is_echo(error.what());
}

// What a rank says and gets in a split.
struct Split {
  int color = 0;
  int key = 0;
  ThreadRank::Part part = {};
};

// One chunk that makes the groups of all colors. The slots' `out` are Split.
Chunks split_chunks(const Rendezvous& parent) {
  const auto run = [&parent](std::span<const Slot> slots, int block, std::int64_t) {
    if (block != 0) return;
    std::map<int, std::vector<Split*>> by_color;
    std::map<const Split*, int> world_ranks;
    for (std::size_t r = 0; r < slots.size(); ++r) {
      auto* split = static_cast<Split*>(slots[r].out);
      by_color[split->color].push_back(split);
      world_ranks[split] = parent.world_rank(static_cast<int>(r));
    }
    for (auto& [color, splits] : by_color) {
      std::ranges::stable_sort(splits, {}, &Split::key);
      std::vector<int> members;
      for (const Split* split : splits) members.push_back(world_ranks[split]);
      const auto group = std::make_shared<Rendezvous>(
          parent.world(), fmt::format("{}:{}", parent.name(), color), std::move(members));
      for (std::size_t r = 0; r < splits.size(); ++r) {
        splits[r]->part.group = group;
        splits[r]->part.rank = static_cast<int>(r);
      }
    }
  };
  return {.num_per_block = 1, .wake = false, .run = run};
}

}  // namespace

ThreadRank::~ThreadRank() {
  if (kind_ == Kind::kSplit && std::uncaught_exceptions() > num_exceptions_) return;
  group_->depart(rank_, sequence_);
}

void ThreadRank::declare(std::string_view what) {
  group_->announce(rank_,
                   next_call({.op = Rendezvous::kDeclare, .label = what}, std::string(what)));
}

void ThreadRank::barrier(std::string_view label) {
  group_->meet(rank_,
               next_call({.op = "barrier", .label = label}, fmt::format("barrier '{}'", label)), {},
               {});
}

ThreadRank::Part ThreadRank::split(int color, int key) {
  Split split{.color = color, .key = key};
  group_->meet(rank_, next_call({.op = "split"}, "split"), {.in = nullptr, .out = &split},
               split_chunks(*group_));
  return split.part;
}

std::shared_ptr<Rendezvous> make_world(int size, std::chrono::milliseconds deadline,
                                       std::function<void(const std::string& message)> on_failure,
                                       std::shared_ptr<FlightRecorder> flight) {
  engine::require(size >= 1, "[world] expected at least 1 rank, got {}", size);
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<Rendezvous>(
      std::make_shared<World>(deadline, std::move(on_failure), std::move(flight)), "world",
      std::move(members));
}

void run_on_threads(std::vector<std::unique_ptr<ProcessGroup>> groups, World& world,
                    const std::function<void(ProcessGroup&)>& fn) {
  Errors errors;
  const auto run_rank = [&](std::unique_ptr<ProcessGroup>& its) {
    const auto group = std::move(its);
    try {
      fn(*group);
    } catch (const std::exception& error) {
      errors.add(is_echo(world, error));
      group->abort(error.what());
    } catch (...) {
      errors.add(false);
      group->abort("an exception of unknown type");
    }
  };
  // Those that have started would wait for the others until the deadline.
  const auto tell = [&](std::string_view what) {
    world.abort_with([&] { return fmt::format("[abort] by the main thread: {}", what); });
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(groups.size());
    for (auto& group : groups) {
      try {
        // By reference: the group of a thread that does not start has not left before that is told.
        threads.emplace_back(run_rank, std::ref(group));
      } catch (const std::system_error& error) {
        tell("a thread that does not start");
        engine::fail<engine::DeviceError>("[threads] expected to start {} threads, got {} after {}",
                                          groups.size(), error.what(), threads.size());
      } catch (...) {
        tell("no memory for a thread");
        throw;
      }
    }
  }
  errors.rethrow();
}

}  // namespace tessera::comm
