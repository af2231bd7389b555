#include "comm/threads.h"

#include <fmt/core.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/pieces.h"
#include "comm/rendezvous.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Work;

// What a rank says and gets in a split.
struct Split {
  int color = 0;
  int key = 0;
  std::shared_ptr<Rendezvous> group = nullptr;
  int rank = 0;
};

// One piece that makes the groups of all colors.
Pieces split_pieces(const Rendezvous& parent) {
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
        splits[r]->group = group;
        splits[r]->rank = static_cast<int>(r);
      }
    }
  };
  return {.num_per_block = 1, .wake = false, .run = run};
}

class ThreadsGroup final : public ProcessGroup {
 public:
  enum class Kind { kWorld, kSplit };

  ThreadsGroup(std::shared_ptr<Rendezvous> rendezvous, int rank, Kind kind)
      : rendezvous_(std::move(rendezvous)), rank_(rank), kind_(kind) {}

  // A part that an exception unwinds says nothing: the world will be told of the exception itself.
  ~ThreadsGroup() override {
    if (kind_ == Kind::kSplit && std::uncaught_exceptions() > num_exceptions_) return;
    rendezvous_->depart(rank_, sequence_);
  }

  int rank() const override { return rank_; }
  int size() const override { return rendezvous_->size(); }

  void barrier(std::string_view label) override {
    rendezvous_->meet(rank_, next_call("barrier", fmt::format("barrier '{}'", label)), {}, {});
  }

  std::unique_ptr<ProcessGroup> split(int color, int key) override {
    Split split{.color = color, .key = key};
    rendezvous_->meet(rank_, next_call("split", "split"), {.in = nullptr, .out = &split},
                      split_pieces(*rendezvous_));
    return std::make_unique<ThreadsGroup>(std::move(split.group), split.rank, Kind::kSplit);
  }

  void check() override { rendezvous_->world()->check(); }

  void abort(std::string_view reason) noexcept override {
    rendezvous_->world()->abort(
        fmt::format("[abort] by rank {}: {}", rendezvous_->world_rank(rank_), reason));
  }

  bool is_echo(const std::exception& error) const {
    return dynamic_cast<const CommError*>(&error) != nullptr &&
           rendezvous_->world()->is_echo(error.what());
  }

 private:
  // Each states the work of one rank's share.
  void do_all_gather(const Tensor& in, const Tensor& out, const Stream& stream,
                     std::string_view label) override {
    enqueue(stream,
            Work{.name = "all_gather",
                 .bytes_read = in.nbytes(),
                 .bytes_written = out.nbytes(),
                 .detail = std::string(label)},
            describe(in.dtype(), in.numel()), in, out, all_gather_pieces(in.nbytes(), size()));
  }

  void do_reduce_scatter(const Tensor& in, const Tensor& out, Accumulate accumulate,
                         const Stream& stream, std::string_view label) override {
    const bool adds = accumulate == Accumulate::kYes;
    enqueue(stream,
            Work{.name = "reduce_scatter",
                 .flops = static_cast<double>(out.numel()) * (size() - 1 + adds),
                 .bytes_read = in.nbytes() + adds * out.nbytes(),
                 .bytes_written = out.nbytes(),
                 .detail = std::string(label)},
            describe(in.dtype(), out.numel(), accumulate), in, out,
            reduce_scatter_pieces(in.dtype(), out.numel(), accumulate, size()));
  }

  void do_all_reduce(const Tensor& in, const Tensor& out, Accumulate accumulate,
                     const Stream& stream, std::string_view label) override {
    const bool adds = accumulate == Accumulate::kYes;
    enqueue(stream,
            Work{.name = "all_reduce",
                 .flops = static_cast<double>(out.numel()) * (size() - 1 + adds) / size(),
                 .bytes_read = in.nbytes() + adds * out.nbytes() / size(),
                 .bytes_written = out.nbytes(),
                 .detail = std::string(label)},
            describe(in.dtype(), out.numel(), accumulate), in, out,
            all_reduce_pieces(in.dtype(), out.numel(), accumulate, size()));
  }

  void do_broadcast(const Tensor& inout, int root, const Stream& stream,
                    std::string_view label) override {
    enqueue(stream,
            Work{.name = "broadcast",
                 .bytes_read = inout.nbytes() / size(),
                 .bytes_written = inout.nbytes() * (size() - 1) / size(),
                 .detail = std::string(label)},
            fmt::format("{} from rank {}", describe(inout.dtype(), inout.numel()),
                        rendezvous_->world_rank(root)),
            inout, inout, broadcast_pieces(inout.nbytes(), root, size()));
  }

  void do_all_to_all(const Tensor& in, const Tensor& out, const Stream& stream,
                     std::string_view label) override {
    enqueue(stream,
            Work{.name = "all_to_all",
                 .bytes_read = in.nbytes(),
                 .bytes_written = out.nbytes(),
                 .detail = std::string(label)},
            describe(in.dtype(), in.numel()), in, out,
            all_to_all_pieces(in.nbytes() / size(), size()));
  }

  static std::string describe(DType dtype, std::int64_t numel,
                              Accumulate accumulate = Accumulate::kNo) {
    return fmt::format("{} x {}{}", name_of(dtype), numel,
                       accumulate == Accumulate::kYes ? " onto a sum" : "");
  }

  Call next_call(std::string_view op, std::string text) {
    return {.sequence = sequence_++, .op = op, .text = std::move(text)};
  }

  // Pointers are taken now, in the caller's thread: it may release the buffers once it has an event
  // behind this. The tensors ride along so that the memory lives until then.
  void enqueue(const Stream& stream, Work work, const std::string& what, const Tensor& in,
               const Tensor& out, Pieces pieces) {
    Call call = next_call(work.name, fmt::format("{} {} '{}'", work.name, what, work.detail));
    const Slot slot{.in = in.raw(), .out = out.raw()};
    stream.launch(std::move(work),
                  [rendezvous = rendezvous_, rank = rank_, call = std::move(call), slot, in, out,
                   pieces = std::move(pieces)] { rendezvous->meet(rank, call, slot, pieces); });
  }

  const std::shared_ptr<Rendezvous> rendezvous_;
  const int rank_;
  const Kind kind_;
  const int num_exceptions_ = std::uncaught_exceptions();
  std::int64_t sequence_ = 0;
};

std::vector<std::unique_ptr<ThreadsGroup>> make_groups(int size, const ThreadsOptions& options) {
  engine::require(size >= 1, "[threads] expected a world of at least 1 rank, got {}", size);
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  const auto rendezvous = std::make_shared<Rendezvous>(std::make_shared<World>(options.deadline),
                                                       "world", std::move(members));
  std::vector<std::unique_ptr<ThreadsGroup>> groups;
  for (int r = 0; r < size; ++r) {
    groups.push_back(std::make_unique<ThreadsGroup>(rendezvous, r, ThreadsGroup::Kind::kWorld));
  }
  return groups;
}

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

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_threads_world(int size, ThreadsOptions options) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (auto& group : make_groups(size, options)) groups.push_back(std::move(group));
  return groups;
}

void run_ranks(int size, ThreadsOptions options, const std::function<void(ProcessGroup&)>& fn) {
  auto groups = make_groups(size, options);
  Errors errors;
  const auto run_rank = [&](std::unique_ptr<ThreadsGroup> group) {
    try {
      fn(*group);
    } catch (const std::exception& error) {
      errors.add(group->is_echo(error));
      group->abort(error.what());
    } catch (...) {
      errors.add(false);
      group->abort("an exception of unknown type");
    }
  };
  {
    // If a thread cannot start, its group dies and the ranks that wait for it fail.
    std::vector<std::jthread> threads;
    for (auto& group : groups) {
      try {
        threads.emplace_back(run_rank, std::move(group));
      } catch (const std::system_error& error) {
        engine::fail<engine::DeviceError>("[threads] expected to start {} threads, got {} after {}",
                                          size, error.what(), threads.size());
      }
    }
  }
  errors.rethrow();
}

}  // namespace tessera::comm
