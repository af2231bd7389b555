#include "comm/hybrid/hybrid_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "comm/flight_call.h"
#include "comm/hybrid/collectives.h"
#include "comm/hybrid/share.h"
#include "comm/messages/collectives.h"
#include "comm/messages/message_group.h"
#include "comm/messages/message_rank.h"
#include "comm/messages/messages.h"
#include "comm/staging.h"
#include "comm/threads/thread_ranks.h"
#include "comm/threads/threads_group.h"
#include "comm/world/declared.h"

namespace tessera::comm {
namespace {

// What the ranks of a group share that are in this process.
struct HybridPart {
  HybridPart(std::shared_ptr<MessageWorld> world, const std::string& name,
             std::vector<GroupProcess> processes)
      : shared(std::move(world)) {
    const int process = shared->transport->process();
    const auto mine = std::ranges::find(processes, process, &GroupProcess::process);
    const std::vector<int> members = mine->ranks;
    all = ranks_of(processes);
    first = static_cast<int>(std::ranges::find(all, members.front()) - all.begin());
    const bool is_alone = processes.size() == 1;
    if (is_alone || all.size() > processes.size()) {
      here = std::make_shared<Rendezvous>(
          shared->world, name, members,
          is_alone ? Rendezvous::Part()
                   : Rendezvous::Part{fmt::format("of process {}", process), all});
    }
    if (is_alone) return;
    FlightRecorder* const flight = here == nullptr ? shared->world->flight() : nullptr;
    between = std::make_shared<MessageRank>(shared, name, std::move(processes), flight);
  }

  std::shared_ptr<const void> pause() const {
    return shared->peers.pause ? shared->peers.pause() : shared->world->pause_deadline();
  }

  // Once all ranks here have made `call`, one of them calls fn(slots, call) with what they brought.
  // Between processes the call has number `number`.
  template <class F>
  void meet(int rank, const Call& call, std::int64_t number, const Slot& slot, F fn) {
    here->meet(rank, call, slot,
               {.num_per_block = 1,
                .wake = false,
                .run = [&](std::span<const Slot> slots, int block, std::int64_t) {
                  if (block != 0) return;
                  Call numbered = call;
                  numbered.sequence = number;
                  numbered.flight = {};
                  fn(slots, numbered);
                }});
  }

  // Which of the ranks here, that bring `shares`, came last, and how long after the others.
  void tell_last(const std::vector<std::shared_ptr<HybridShare>>& shares,
                 Messages& messages) const {
    if (shares.size() < 2) return;
    const auto came = [&](std::size_t i) { return shares[i]->came; };
    std::size_t last = 0;
    auto before = std::chrono::steady_clock::time_point::min();
    for (std::size_t i = 1; i < shares.size(); ++i) {
      before = std::max(before, std::min(came(i), came(last)));
      if (came(i) > came(last)) last = i;
    }
    messages.came_last(here->world_rank(static_cast<int>(last)), came(last) - before);
  }

  const std::shared_ptr<MessageWorld> shared;
  std::vector<int> all;                  // ranks of the group, as ranks of the world
  int first = 0;                         // which of them is the first one here
  std::shared_ptr<Rendezvous> here;      // null: each rank is in another process
  std::shared_ptr<MessageRank> between;  // null: all ranks are in this process
};

std::unique_ptr<ProcessGroup> make_group(const std::shared_ptr<HybridPart>& part, int rank,
                                         ThreadRank::Kind kind);

class HybridGroup final : public ProcessGroup {
 public:
  /// `rank`: among those here.
  HybridGroup(std::shared_ptr<HybridPart> part, int rank, ThreadRank::Kind kind)
      : part_(std::move(part)), self_(part_->here, rank, kind) {}

  int rank() const override { return part_->first + self_.rank(); }
  int size() const override { return static_cast<int>(part_->all.size()); }
  bool sums_in_rank_order() const override { return true; }
  void agree(const Stream& /*stream*/) override {}
  std::shared_ptr<const void> pause_deadline() override { return part_->pause(); }
  void check() override { self_.world().check(); }
  void abort(std::string_view reason) noexcept override {
    self_.world().abort_by(self_.world_rank(), reason);
  }

  // At once among those here; the other processes are told with the next call.
  void declare(std::string_view what) override {
    self_.declare(what);
    ++num_declared_;
    declared_.add(what);
  }

  void barrier(std::string_view label) override {
    const Call call =
        next_call({.op = "barrier", .label = label}, fmt::format("barrier '{}'", label));
    part_->meet(self_.rank(), call, number_of(call), {}, [&](std::span<const Slot>, const Call& c) {
      Messages(*part_->between, c, nullptr).meet();
    });
  }

 private:
  // What a rank says and gets in a split.
  struct Split {
    int color, key;
    std::shared_ptr<HybridPart> part = nullptr;
    int rank = 0;
  };

  int world_rank(int rank) const override { return part_->all[static_cast<std::size_t>(rank)]; }

  Call next_call(const FlightCall& what, std::string text) {
    Call call = self_.next_call(what, declared_.before(std::move(text)));
    part_->shared->peers.say_call(
        fmt::format("#{} {} of {}", call.sequence, call.text, part_->here->name()));
    return call;
  }

  // What was declared has a number among the ranks here alone: processes may have declared more or
  // less, and are to find each other's next call all the same.
  std::int64_t number_of(const Call& call) const { return call.sequence - num_declared_; }

  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    Split split{.color = color, .key = key};
    const Call call = next_call({.op = "split"}, "split");
    part_->meet(self_.rank(), call, number_of(call), {.in = nullptr, .out = &split},
                [&](std::span<const Slot> slots, const Call& c) { split_all(slots, c); });
    return make_group(split.part, split.rank, ThreadRank::Kind::kSplit);
  }

  // For all ranks here. Their slots' `out` are Split.
  void split_all(std::span<const Slot> slots, const Call& call) {
    MessageRank& between = *part_->between;
    std::vector<SplitPlace> own;
    std::map<int, std::vector<Split*>> by_color;
    std::map<const Split*, int> world_ranks;
    std::map<int, std::int32_t> numbers;
    for (const Slot& slot : slots) {
      auto* const split = static_cast<Split*>(slot.out);
      auto& ranks = by_color[split->color];
      if (ranks.empty()) numbers[split->color] = between.next_number();
      ranks.push_back(split);
      world_ranks[split] = part_->here->world_rank(static_cast<int>(own.size()));
      own.push_back({split->color, split->key, numbers[split->color]});
    }
    Messages messages(between, call, nullptr);
    messages.meet();
    const std::vector<SplitPlace> places = messages.exchange(own);
    for (const auto& [color, splits] : by_color) {
      const std::string name = fmt::format("{}:{}", part_->here->name(), color);
      auto processes = split_processes(between.processes(), places, color, name);
      const auto mine =
          std::ranges::find(processes, part_->shared->transport->process(), &GroupProcess::process);
      const std::vector<int> members = mine->ranks;
      const auto part = std::make_shared<HybridPart>(part_->shared, name, std::move(processes));
      for (Split* const split : splits) {
        split->part = part;
        split->rank =
            static_cast<int>(std::ranges::find(members, world_ranks[split]) - members.begin());
      }
    }
  }

  // Pointers are taken now, in the caller's thread: it may release the buffers once it has an event
  // after this.
  std::int64_t enqueue(Collective collective, const Stream& stream) override {
    check_on_host(collective, stream, self_.world_rank());
    const std::int64_t sent = collective.work.bytes_sent;
    const auto share = std::make_shared<HybridShare>();
    if (const std::int64_t nbytes = chain_nbytes(collective)) {
      share->staging = staging_.get(nbytes, collective.out.buffer()->memory(), stream);
    }
    share->in_slot = collective.in.buffer()->slot();
    share->out_slot = collective.out.buffer()->slot();
    share->in = collective.in.raw();
    share->out = collective.out.raw();
    const Call call = next_call(flight_call(collective), std::move(collective.text));
    engine::Work work = std::move(collective.work);
    const Chunks inside = chunks_inside(collective, size(), part_->first, part_->here->size());
    share->collective = std::move(collective);
    stream.launch(std::move(work),
                  [part = part_, rank = self_.rank(), call, number = number_of(call), share,
                   inside] { carry_out(*part, rank, call, number, share, inside); });
    return sent;
  }

  static void carry_out(HybridPart& part, int rank, const Call& call, std::int64_t number,
                        const std::shared_ptr<HybridShare>& share, const Chunks& inside) {
    const Slot slot{.in = nullptr, .out = share.get()};
    share->came = std::chrono::steady_clock::now();
    part.meet(rank, call, number, slot, [&](std::span<const Slot> slots, const Call& c) {
      const auto shares = std::make_shared<std::vector<std::shared_ptr<HybridShare>>>();
      for (const Slot& s : slots) {
        shares->push_back(static_cast<HybridShare*>(s.out)->shared_from_this());
      }
      Messages messages(*part.between, c, shares);
      part.tell_last(*shares, messages);
      exchange_between({*shares, part.first, *part.between, messages});
      if (inside.wake) return;
      for (int block = 0; block < part.here->size(); ++block) {
        for (std::int64_t i = 0; i < inside.num_per_block; ++i) inside.run(slots, block, i);
      }
    });
    if (inside.num_per_block == 0 || !inside.wake) return;
    part.here->meet(rank, {.sequence = call.sequence, .op = call.op, .text = call.text, .round = 1},
                    slot, inside);
  }

  const std::shared_ptr<HybridPart> part_;
  ThreadRank self_;
  Declared declared_;
  std::int64_t num_declared_ = 0;
  Staging staging_{"comm.staging"};
};

std::unique_ptr<ProcessGroup> make_group(const std::shared_ptr<HybridPart>& part, int rank,
                                         ThreadRank::Kind kind) {
  if (part->here == nullptr) return make_message_group(part->between);
  if (part->between == nullptr) {
    return make_threads_group(part->here, rank, kind, [part] { return part->pause(); });
  }
  return std::make_unique<HybridGroup>(part, rank, kind);
}

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_hybrid_groups(std::shared_ptr<MessageWorld> world) {
  std::vector<GroupProcess> processes;
  for (std::size_t r = 0; r < world->process_of.size(); ++r) {
    const int process = world->process_of[r];
    if (processes.empty() || processes.back().process != process) {
      processes.push_back({.process = process, .ranks = {}, .number = 0});
    }
    processes.back().ranks.push_back(static_cast<int>(r));
  }
  const auto num_here = std::ranges::count(world->process_of, world->transport->process());
  const auto part = std::make_shared<HybridPart>(std::move(world), "world", std::move(processes));
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < num_here; ++r) {
    groups.push_back(make_group(part, r, ThreadRank::Kind::kWorld));
  }
  return groups;
}

}  // namespace tessera::comm
