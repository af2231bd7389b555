#include "comm/threads.h"

#include <string>
#include <utility>

#include "comm/flight_call.h"
#include "comm/threads/chunks.h"
#include "comm/threads/peer_collectives.h"
#include "comm/threads/rendezvous.h"
#include "comm/threads/thread_ranks.h"
#include "comm/threads/threads_group.h"

namespace tessera::comm {
namespace {

class ThreadsGroup final : public ProcessGroup {
 public:
  ThreadsGroup(std::shared_ptr<Rendezvous> group, int rank, ThreadRank::Kind kind,
               std::function<std::shared_ptr<const void>()> pause)
      : self_(std::move(group), rank, kind), pause_(std::move(pause)) {}

  int rank() const override { return self_.rank(); }
  int size() const override { return self_.group()->size(); }
  bool sums_in_rank_order() const override { return true; }
  void agree(const Stream&) override {}
  void declare(std::string_view what) override { self_.declare(what); }
  void barrier(std::string_view label) override { self_.barrier(label); }

  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    ThreadRank::Part part = self_.split(color, key);
    return make_threads_group(std::move(part.group), part.rank, ThreadRank::Kind::kSplit, pause_);
  }

  std::shared_ptr<const void> pause_deadline() override {
    return pause_ ? pause_() : self_.world().pause_deadline();
  }

  void check() override {
    World& world = self_.world();
    try {
      if (check_gpus_) check_gpus_();
    } catch (const engine::DeviceError& error) {
      world.abort(error.what());
    }
    world.check();
  }

  void abort(std::string_view reason) noexcept override {
    self_.world().abort_by(self_.world_rank(), reason);
  }

 private:
  int world_rank(int rank) const override { return self_.group()->world_rank(rank); }

  // Pointers are taken now, in the caller's thread: it may release the buffers once it has an event
  // after this. The tensors ride along so that the memory lives until then.
  std::int64_t enqueue(Collective collective, const Stream& stream) override {
    const std::int64_t sent = collective.work.bytes_sent;
    const Call call = self_.next_call(flight_call(collective), std::move(collective.text));
    const Slot slot{.in = collective.in.raw(), .out = collective.out.raw()};
    stream.launch(
        std::move(collective.work),
        [group = self_.group(), rank = rank(), call, slot, in = collective.in, out = collective.out,
         chunks = chunks_of(collective, size())] { group->meet(rank, call, slot, chunks); },
        [&](const auto& gpu) {
          check_gpus_ = meet_on_gpu(*self_.group(), rank(), call, collective, gpu);
        });
    return sent;
  }

  ThreadRank self_;
  const std::function<std::shared_ptr<const void>()> pause_;
  std::function<void()> check_gpus_;  // of the last call on one
};

std::vector<std::unique_ptr<ProcessGroup>> make_groups(
    const std::shared_ptr<Rendezvous>& rendezvous) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < rendezvous->size(); ++r) {
    groups.push_back(make_threads_group(rendezvous, r, ThreadRank::Kind::kWorld));
  }
  return groups;
}

}  // namespace

std::unique_ptr<ProcessGroup> make_threads_group(
    std::shared_ptr<Rendezvous> group, int rank, ThreadRank::Kind kind,
    std::function<std::shared_ptr<const void>()> pause) {
  return std::make_unique<ThreadsGroup>(std::move(group), rank, kind, std::move(pause));
}

std::vector<std::unique_ptr<ProcessGroup>> make_threads_world(int size, ThreadsOptions options) {
  return make_groups(make_world(size, options.deadline, options.on_failure, options.flight));
}

void run_ranks(int size, ThreadsOptions options, const std::function<void(ProcessGroup&)>& fn) {
  const auto rendezvous = make_world(size, options.deadline, options.on_failure, options.flight);
  run_on_threads(make_groups(rendezvous), *rendezvous->world(), fn);
}

}  // namespace tessera::comm
