#include "comm/threads.h"

#include <fmt/core.h>

#include <exception>
#include <string>
#include <utility>

#include "comm/threads/chunks.h"
#include "comm/threads/peer_collectives.h"
#include "comm/threads/rendezvous.h"
#include "comm/threads/thread_ranks.h"

namespace tessera::comm {
namespace {

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
  bool sums_in_rank_order() const override { return true; }

  void agree(const Stream&) override {}

  void barrier(std::string_view label) override {
    rendezvous_->meet(rank_, next_call("barrier", fmt::format("barrier '{}'", label)), {}, {});
  }

  std::unique_ptr<ProcessGroup> split(int color, int key) override {
    Split split{.color = color, .key = key};
    rendezvous_->meet(rank_, next_call("split", "split"), {.in = nullptr, .out = &split},
                      split_chunks(*rendezvous_));
    return std::make_unique<ThreadsGroup>(std::move(split.group), split.rank, Kind::kSplit);
  }

  std::shared_ptr<const void> pause_deadline() override {
    return rendezvous_->world()->pause_deadline();
  }

  void check() override {
    World& world = *rendezvous_->world();
    try {
      if (check_gpus_) check_gpus_();
    } catch (const engine::DeviceError& error) {
      world.abort(error.what());
    }
    world.check();
  }

  void abort(std::string_view reason) noexcept override {
    rendezvous_->world()->abort_with([&] {
      return fmt::format("[abort] by rank {}: {}", rendezvous_->world_rank(rank_), reason);
    });
  }

 private:
  int world_rank(int rank) const override { return rendezvous_->world_rank(rank); }

  Call next_call(std::string_view op, std::string text) {
    return {.sequence = sequence_++, .op = op, .text = std::move(text)};
  }

  // Pointers are taken now, in the caller's thread: it may release the buffers once it has an event
  // behind this. The tensors ride along so that the memory lives until then.
  void enqueue(Collective collective, const Stream& stream) override {
    const Call call = next_call(collective.work.name, std::move(collective.text));
    const Slot slot{.in = collective.in.raw(), .out = collective.out.raw()};
    stream.launch(
        std::move(collective.work),
        [rendezvous = rendezvous_, rank = rank_, call, slot, in = collective.in,
         out = collective.out,
         chunks = chunks_of(collective, size())] { rendezvous->meet(rank, call, slot, chunks); },
        [&](const auto& gpu) {
          check_gpus_ = meet_on_gpu(*rendezvous_, rank_, call, collective, gpu);
        });
  }

  const std::shared_ptr<Rendezvous> rendezvous_;
  const int rank_;
  const Kind kind_;
  const int num_exceptions_ = std::uncaught_exceptions();
  std::int64_t sequence_ = 0;
  std::function<void()> check_gpus_;  // of the last call on one
};

std::vector<std::unique_ptr<ProcessGroup>> make_groups(
    const std::shared_ptr<Rendezvous>& rendezvous) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < rendezvous->size(); ++r) {
    groups.push_back(std::make_unique<ThreadsGroup>(rendezvous, r, ThreadsGroup::Kind::kWorld));
  }
  return groups;
}

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_threads_world(int size, ThreadsOptions options) {
  return make_groups(make_world(size, options.deadline, options.on_failure));
}

void run_ranks(int size, ThreadsOptions options, const std::function<void(ProcessGroup&)>& fn) {
  const auto rendezvous = make_world(size, options.deadline, options.on_failure);
  run_on_threads(make_groups(rendezvous), *rendezvous->world(), fn);
}

}  // namespace tessera::comm
