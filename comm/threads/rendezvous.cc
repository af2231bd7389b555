#include "comm/threads/rendezvous.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <utility>

#include "comm/world/futex.h"
#include "comm/world/ranks_text.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;

enum State : std::uint32_t { kOpen, kReady, kComplete, kFailed };

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// How long a rank that gives a meeting up waits for chunks that others are in.
constexpr std::chrono::seconds kBegunPatience(1);

}  // namespace

struct Rendezvous::Meeting {
  Meeting(const Call& c, std::size_t size, std::int64_t num_per_block)
      : call(c),
        slots(size),
        here(size),
        next(size),
        undone(num_per_block * static_cast<std::int64_t>(size)) {}

  void set(State s) {
    state.store(s, std::memory_order_release);
    wake_all(state);
  }

  const Call call;  // of the first to come
  std::vector<Slot> slots;
  std::vector<bool> here;
  int num_here = 0;
  std::atomic<std::uint32_t> state = kOpen;     // leaves kOpen under the world's mutex
  std::vector<std::atomic<std::int64_t>> next;  // by block: the chunk to take next
  std::atomic<std::int64_t> undone;             // chunks of all blocks
  std::atomic<bool> failed = false;             // one of them, or a wait for them; the world, too
};

Rendezvous::Rendezvous(std::shared_ptr<World> world, std::string name, std::vector<int> members,
                       const Part& part)
    : world_(std::move(world)),
      name_(std::move(name)),
      ranks_text_(
          fmt::format("{} ranks{}{}", members.size(), part.text.empty() ? "" : " ", part.text)),
      members_(std::move(members)),
      departed_(members_.size(), kNever),
      last_(members_.size(), "nothing") {
  if (FlightRecorder* flight = world_->flight()) {
    flight_group_ =
        flight->add_group(name_, part.all_members.empty() ? members_ : part.all_members);
    for (const int member : members_) flight_rings_.push_back(&flight->ring(member));
  }
  const auto lock = world_->lock();
  world_->add(this);
}

Rendezvous::~Rendezvous() {
  const auto lock = world_->lock();
  world_->remove(this);
}

FlightTicket Rendezvous::record(int rank, std::int64_t sequence, const FlightCall& call) const {
  if (flight_rings_.empty()) return {};
  FlightRing& ring = *flight_rings_[static_cast<std::size_t>(rank)];
  return {ring, ring.called(flight_group_, sequence, call)};
}

void Rendezvous::meet(int rank, const Call& call, const Slot& slot, const Chunks& chunks) {
  call.flight.enter(FlightState::kStarted);
  try {
    meet_and_work(rank, call, slot, chunks);
  } catch (const std::exception& e) {
    call.flight.enter(FlightState::kFailed);
    // Unless it has failed: no memory. The others wait for this rank, whose stream alone knows.
    world_->abort_by(world_rank(rank), e.what());
    throw;
  }
  call.flight.enter(FlightState::kFinished);
}

void Rendezvous::meet_and_work(int rank, const Call& call, const Slot& slot, const Chunks& chunks) {
  const std::shared_ptr<Meeting> meeting = arrive(rank, call, slot, chunks);
  await(*meeting);

  std::int64_t num_done = 0;
  std::exception_ptr error;
  for (int i = 0; i < (chunks.shared ? size() : 1); ++i) {
    const int block = (rank + i) % size();
    auto& next = meeting->next[static_cast<std::size_t>(block)];
    for (;; ++num_done) {
      const std::int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks.num_per_block) break;
      try {
        chunks.run(meeting->slots, block, chunk);
      } catch (...) {
        error = std::current_exception();
        fail_chunk(call, block);
        meeting->failed.store(true, std::memory_order_relaxed);
      }
    }
  }
  // The release order of the decrements carries everyone's writes to the last, and from it to all.
  if (num_done > 0 && meeting->undone.fetch_sub(num_done, std::memory_order_acq_rel) == num_done) {
    meeting->set(kComplete);
  } else if (chunks.shared) {
    comm::wait_while(meeting->state, kReady);
  } else if (!world_->wait_while(meeting->state, kReady)) {
    give_up(call, *meeting, chunks.num_per_block);
  }
  if (error) std::rethrow_exception(error);
  if (meeting->failed.load(std::memory_order_relaxed)) world_->check();
}

// A rank that is late would read memory which this one may free as soon as it has left: nobody
// begins a chunk from here on, and what has been begun is waited for.
void Rendezvous::give_up(const Call& call, Meeting& meeting, std::int64_t num_per_block) {
  expire(call);
  meeting.failed.store(true, std::memory_order_relaxed);
  std::int64_t num_given_up = 0;
  for (auto& next : meeting.next) {
    const std::int64_t begun = next.exchange(num_per_block, std::memory_order_acq_rel);
    num_given_up += std::max<std::int64_t>(num_per_block - begun, 0);
  }
  if (num_given_up > 0 &&
      meeting.undone.fetch_sub(num_given_up, std::memory_order_acq_rel) == num_given_up) {
    meeting.set(kComplete);
  }
  comm::wait_while(meeting.state, kReady, Clock::now() + kBegunPatience);
}

void Rendezvous::announce(int rank, const Call& call) {
  try {
    arrive(rank, call, {}, {});
  } catch (...) {
    call.flight.enter(FlightState::kFailed);
    throw;
  }
  if (call.op == kDeclare) call.flight.enter(FlightState::kFinished);
}

std::shared_ptr<Rendezvous::Meeting> Rendezvous::arrive(int rank, const Call& call,
                                                        const Slot& slot, const Chunks& chunks) {
  const auto r = static_cast<std::size_t>(rank);
  const auto lock = world_->lock();
  if (world_->failure()) throw CommError(*world_->failure());
  const Key key(call.sequence, call.round);
  auto entry = meetings_.find(key);
  if (entry == meetings_.end()) {
    auto first = std::make_shared<Meeting>(call, members_.size(), chunks.num_per_block);
    entry = meetings_.emplace(key, std::move(first)).first;
  }
  const std::shared_ptr<Meeting> meeting = entry->second;
  if (call.text != meeting->call.text) {
    const auto first = std::find(meeting->here.begin(), meeting->here.end(), true);
    world_->fail_locked(fmt::format("{} expected rank {}'s {}, got rank {}'s {}",
                                    where(meeting->call),
                                    world_rank(static_cast<int>(first - meeting->here.begin())),
                                    meeting->call.text, world_rank(rank), call.text));
    throw CommError(*world_->failure());
  }
  // The host declares ahead of its streams.
  if (call.op != kDeclare) last_[r] = fmt::format("#{} {}", call.sequence, call.text);
  meeting->slots[r] = slot;
  meeting->here[r] = true;
  if (++meeting->num_here < size()) {
    fail_if_departed(*meeting);
    return meeting;
  }
  meetings_.erase(key);
  if (chunks.num_per_block == 0) {
    meeting->set(kComplete);
  } else if (chunks.wake) {
    meeting->set(kReady);
  } else {
    meeting->state.store(kReady, std::memory_order_release);
  }
  return meeting;
}

void Rendezvous::await(Meeting& meeting) {
  world_->wait_while(meeting.state, kOpen);
  const std::uint32_t woken_by = meeting.state.load(std::memory_order_acquire);
  if (woken_by == kReady || woken_by == kComplete) return;
  const auto lock = world_->lock();
  const std::uint32_t state = meeting.state.load(std::memory_order_acquire);
  if (state == kReady || state == kComplete) return;  // the last one came at the last moment
  if (state == kOpen) fail_late(meeting.call, &meeting);
  throw CommError(*world_->failure());
}

void Rendezvous::expire(const Call& call) {
  const auto lock = world_->lock();
  const auto entry = meetings_.find({call.sequence, call.round});
  fail_late(call, entry == meetings_.end() ? nullptr : entry->second.get());
}

// `meeting`: null if all ranks have called.
void Rendezvous::fail_late(const Call& call, const Meeting* meeting) {
  world_->fail_locked(fmt::format(
      "{} expected {} within {} ms, got {}: {}; {}", where(call), ranks_text_,
      world_->deadline().count(), meeting != nullptr ? meeting->num_here : size(),
      meeting != nullptr ? absent(*meeting, false) : "all have called it, not all have done it",
      call.text));
}

// In a handler: tells of the exception.
void Rendezvous::fail_chunk(const Call& call, int block) noexcept {
  const auto tell = [&](std::string_view what) {
    world_->abort_with([&] {
      return fmt::format("{} rank {} failed: {}; {}", where(call), world_rank(block), what,
                         call.text);
    });
  };
  try {
    throw;
  } catch (const std::exception& error) {
    tell(error.what());
  } catch (...) {
    tell("an exception of unknown type");
  }
}

void Rendezvous::depart(int rank, std::int64_t sequence) noexcept {
  const auto lock = world_->lock();
  departed_[static_cast<std::size_t>(rank)] = sequence;
  const auto waiting = meetings_.lower_bound({sequence, 0});
  if (waiting != meetings_.end()) fail_if_departed(*waiting->second);
}

void Rendezvous::fail_if_departed(const Meeting& meeting) noexcept {
  bool all_may_come = true;
  for (std::size_t r = 0; r < members_.size(); ++r) {
    all_may_come = all_may_come && (meeting.here[r] || departed_[r] > meeting.call.sequence);
  }
  if (all_may_come) return;
  world_->fail_locked(World::text_of([&] {
    return fmt::format("{} expected {}, got: {}; {}", where(meeting.call), ranks_text_,
                       absent(meeting, true), meeting.call.text);
  }));
}

std::string Rendezvous::where(const Call& call) const {
  // What is declared is no collective of that name: the words that follow say what it is.
  const std::string_view op = call.op == kDeclare ? "call" : call.op;
  return fmt::format("[{} #{} of {}]", op, call.sequence, name_);
}

void Rendezvous::world_failed() {
  for (const auto& [key, meeting] : meetings_) meeting->set(kFailed);
  meetings_.clear();
}

std::string Rendezvous::wait_of(int world_rank) const {
  const auto member = std::ranges::find(members_, world_rank);
  if (member == members_.end()) return {};
  const auto r = static_cast<std::size_t>(member - members_.begin());
  for (const auto& [key, meeting] : meetings_) {
    if (!meeting->here[r] || meeting->call.op == kDeclare) continue;
    return fmt::format("#{} {} of {}", key.first, meeting->call.text, name_);
  }
  return {};
}

std::string Rendezvous::absent(const Meeting& meeting, bool only_departed) const {
  std::vector<AbsentRank> ranks;
  for (std::size_t r = 0; r < members_.size(); ++r) {
    const bool departed = departed_[r] <= meeting.call.sequence;
    if (meeting.here[r] || (only_departed && !departed)) continue;
    // Where it waits in another group is most often for one of those who wait for it.
    ranks.push_back({.rank = members_[r],
                     .departed = departed,
                     .last = last_[r],
                     .elsewhere = departed ? "" : world_->wait_elsewhere(this, members_[r])});
  }
  return absent_text(ranks);
}

}  // namespace tessera::comm
