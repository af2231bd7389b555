#include "comm/messages/message_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <type_traits>
#include <utility>

#include "comm/flight_recorder.h"
#include "comm/world/ranks_text.h"
#include "engine/error.h"
#include "engine/philox.h"

namespace tessera::comm {
namespace {

using engine::CommError;

// A tag is a group's number, a call's, and whether it carries data.
constexpr std::uint32_t kNumCalls = 1U << 10;
constexpr std::uint32_t kNumGroups =
    Transport::kNumTags / kNumCalls / 2 - 1;  // one tag is join()'s

// For what is on its way already, over the transport or by the control plane.
constexpr std::chrono::milliseconds kPatience(1000);

// Which fingerprint was waited for longest, as they are looked at one after the other.
struct Waits {
  // What comes sooner was there, or as good as.
  static constexpr std::chrono::microseconds kNoWait{100};

  void came(int rank) {
    const auto now = std::chrono::steady_clock::now();
    if (now - seen > std::max<std::chrono::nanoseconds>(longest, kNoWait)) {
      late = rank;
      longest = now - seen;
    }
    seen = now;
  }

  std::chrono::steady_clock::time_point seen = std::chrono::steady_clock::now();
  int late = -1;
  std::chrono::nanoseconds longest{0};
};

}  // namespace

struct MessageRank::Fingerprint {
  std::uint64_t hash = 0;  // of all that must agree
  std::int64_t sequence = 0;
  Place place = {};
  char text[228] = {};  // what must agree, cut
};

MessageRank::MessageRank(std::shared_ptr<MessageWorld> shared, std::string name,
                         std::vector<int> members, int rank, int number)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      members_(std::move(members)),
      rank_(rank),
      number_(number),
      last_(members_.size(), "nothing") {
  engine::require(number < static_cast<int>(kNumGroups),
                  "[split] expected at most {} groups in a world, got more (rank {} of {})",
                  kNumGroups, world_rank(rank_), name_);
  if (FlightRecorder* flight = world().flight()) {
    flight_group_ = flight->add_group(name_, members_);
    ring_ = &flight->ring(world_rank(rank_));
  }
}

Call MessageRank::next_call(const FlightCall& what, std::string text) {
  const std::int64_t sequence = sequence_++;
  if (!declared_.empty()) {
    text += fmt::format(" after '{}'", std::exchange(declared_, {}));
  }
  shared_->say_call(fmt::format("#{} {} of {}", sequence, text, name_));
  FlightTicket flight;
  if (ring_ != nullptr) flight = {*ring_, ring_->called(flight_group_, sequence, what)};
  return {.sequence = sequence, .op = what.op, .text = std::move(text), .flight = flight};
}

void MessageRank::declare(std::string_view what) {
  declared_ += fmt::format("{}{}", declared_.empty() ? "" : "; ", what);
  if (ring_ != nullptr) {
    FlightTicket(*ring_, ring_->called(flight_group_, sequence_, {.op = "declare", .label = what}))
        .enter(FlightState::kFinished);
  }
}

void MessageRank::barrier(std::string_view label) {
  const Call call =
      next_call({.op = "barrier", .label = label}, fmt::format("barrier '{}'", label));
  Messages(*this, call, nullptr).meet();
}

MessageRank::Part MessageRank::split(int color, int key) {
  const Call call = next_call({.op = "split"}, "split");
  Place own{.color = color, .key = key, .next_group = 0};
  {
    const std::lock_guard lock(shared_->mutex);
    own.next_group = shared_->next_group;
  }
  const auto places = Messages(*this, call, nullptr).meet(own);
  Part part{.name = fmt::format("{}:{}", name_, color), .members = {}};
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    const Place& place = places[static_cast<std::size_t>(r)];
    part.number = std::max(part.number, place.next_group);
    if (place.color == color) ranks.push_back(r);
  }
  std::ranges::stable_sort(ranks, {},
                           [&](int r) { return places[static_cast<std::size_t>(r)].key; });
  for (const int r : ranks) part.members.push_back(world_rank(r));
  part.rank = static_cast<int>(std::ranges::find(ranks, rank_) - ranks.begin());
  const std::lock_guard lock(shared_->mutex);
  shared_->next_group = std::max(shared_->next_group, part.number + 1);
  return part;
}

std::string MessageRank::last_of(int rank) const {
  const std::lock_guard lock(mutex_);
  return last_[static_cast<std::size_t>(rank)];
}

void MessageRank::came_to(int rank, const Fingerprint& fingerprint) {
  const std::lock_guard lock(mutex_);
  last_[static_cast<std::size_t>(rank)] =
      fmt::format("#{} {}", fingerprint.sequence, static_cast<const char*>(fingerprint.text));
}

MessageRank::Messages::Messages(MessageRank& rank, const Call& call,
                                std::shared_ptr<const void> owner)
    : rank_(rank), call_(call), owner_(std::move(owner)) {
  call_.flight.enter(FlightState::kStarted);
}

MessageRank::Messages::~Messages() {
  const bool failed = std::uncaught_exceptions() > num_exceptions_;
  call_.flight.enter(failed ? FlightState::kFailed : FlightState::kFinished);
}

std::vector<MessageRank::Place> MessageRank::Messages::meet(const Place& own) {
  static_assert(std::is_trivially_copyable_v<Fingerprint> && sizeof(Fingerprint) == 256);
  rank_.world().check();  // for groups of one rank, too
  const auto at = [](int r) { return static_cast<std::size_t>(r); };
  const auto all = std::make_shared<std::vector<Fingerprint>>(at(rank_.size()));
  Fingerprint& mine = (*all)[at(rank_.rank())];
  mine.hash = engine::fnv1a(call_.text);
  mine.sequence = call_.sequence;
  mine.place = own;
  call_.text.copy(mine.text, sizeof(mine.text) - 1);
  std::vector<Posted> early = std::exchange(posted_, {});
  for (const bool sends : {false, true}) {
    for (int r = 0; r < rank_.size(); ++r) {
      Fingerprint& fingerprint = sends ? mine : (*all)[at(r)];
      post(r, sends, kMeets, std::as_writable_bytes(std::span(&fingerprint, 1)), all);
    }
  }
  Waits waits;
  await([&](int r) {
    waits.came(r);
    Fingerprint& his = (*all)[at(r)];
    his.text[sizeof(his.text) - 1] = '\0';
    rank_.came_to(r, his);
  });
  if (FlightRecorder* flight = rank_.world().flight(); flight != nullptr && rank_.size() > 1) {
    flight->met(waits.late < 0 ? -1 : rank_.world_rank(waits.late), waits.longest.count());
  }
  std::vector<Place> places;
  for (const Fingerprint& fingerprint : *all) places.push_back(fingerprint.place);
  const Fingerprint& first = (*all)[0];
  const auto other = std::ranges::find_if(*all, [&](const Fingerprint& f) {
    return f.hash != first.hash || f.sequence != first.sequence;
  });
  if (other == all->end()) {
    has_met_ = true;
    posted_ = std::move(early);
    return places;
  }
  const std::string_view text = first.text;
  fail(fmt::format("[{} #{} of {}] expected rank {}'s {}, got rank {}'s {}{}",
                   text.substr(0, text.find(' ')), first.sequence, rank_.name_, rank_.world_rank(0),
                   text, rank_.world_rank(static_cast<int>(other - all->begin())),
                   other->sequence == first.sequence ? "" : fmt::format("#{} ", other->sequence),
                   static_cast<const char*>(other->text)));
}

std::size_t MessageRank::Messages::send(int rank, const void* bytes, std::int64_t nbytes) {
  // A transport does not write what it sends.
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(bytes));
  return post(rank, true, kMoves, {begin, static_cast<std::size_t>(nbytes)}, owner_);
}

std::size_t MessageRank::Messages::receive(int rank, void* bytes, std::int64_t nbytes) {
  const auto size = static_cast<std::size_t>(nbytes);
  if (has_met_) return post(rank, false, kMoves, {static_cast<std::byte*>(bytes), size}, owner_);
  const auto early = std::make_shared<std::vector<std::byte>>(size);
  const std::size_t message = post(rank, false, kMoves, *early, early);
  posted_[message].early = early;
  posted_[message].place = bytes;
  return message;
}

std::size_t MessageRank::Messages::post(int rank, bool sends, std::uint32_t phase,
                                        std::span<std::byte> bytes,
                                        const std::shared_ptr<const void>& owner) {
  Posted posted{.rank = rank, .sends = sends, .transfer = nullptr};
  if (rank != rank_.rank() && !bytes.empty()) {
    rank_.world().check();
    const auto call = static_cast<std::uint32_t>(call_.sequence) % kNumCalls;
    const std::uint32_t tag =
        (static_cast<std::uint32_t>(rank_.number_) * kNumCalls + call) * 2 + phase;
    Transport& transport = *rank_.shared_->transport;
    const int process = rank_.world_rank(rank);
    try {
      posted.transfer = sends ? transport.send(process, tag, bytes, owner)
                              : transport.receive(process, tag, bytes, owner);
    } catch (const CommError& error) {
      fail_at(rank, error.what());
    }
  }
  posted_.push_back(std::move(posted));
  return posted_.size() - 1;
}

void MessageRank::Messages::await(const std::function<void(int rank)>& received) {
  const auto limit = rank_.world().time_limit();
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    if (posted_[i].transfer == nullptr) continue;
    await_one(i, limit);
    if (!posted_[i].sends) received(posted_[i].rank);
  }
  posted_.clear();
}

void MessageRank::Messages::wait(std::size_t message) {
  await_one(message, rank_.world().time_limit());
}

void MessageRank::Messages::await_one(std::size_t i, DeadlineClock::time_point limit) {
  World& world = rank_.world();
  while (!is_done(posted_[i], DeadlineClock::kTick)) {
    world.check();
    if (const auto left = pending_ranks(i, true); !left.empty()) fail_without(left);
    if (world.clock().now() >= limit) expire(i);
  }
}

std::vector<AbsentRank> MessageRank::Messages::pending_ranks(std::size_t first, bool departed) {
  std::vector<AbsentRank> ranks;
  for (std::size_t i = first; i < posted_.size(); ++i) {
    const int rank = posted_[i].rank;
    if (departed && !has_left(rank)) continue;
    // What it sent before it left may come later than the word that it has left.
    const bool waits = departed && ranks.empty();
    if (is_done(posted_[i], waits ? kPatience : std::chrono::milliseconds(0))) continue;
    const int number = rank_.world_rank(rank);
    if (std::ranges::find(ranks, number, &AbsentRank::rank) != ranks.end()) continue;
    ranks.push_back({.rank = number, .departed = departed, .last = rank_.last_of(rank)});
  }
  return ranks;
}

void MessageRank::Messages::expire(std::size_t first) {
  // A process that has stopped is found elsewhere at about this time. It keeps others from going
  // on, who look from here as if it were they.
  wait_for_word(std::min(kPatience, rank_.world().deadline()));
  const std::vector<AbsentRank> ranks = pending_ranks(first, false);
  fail(fmt::format("{} expected {} ranks within {} ms, got {}: {}; {}", where(), rank_.size(),
                   rank_.world().deadline().count(), rank_.size() - static_cast<int>(ranks.size()),
                   ranks.empty() ? "the last came too late" : absent_text(ranks), call_.text));
}

void MessageRank::Messages::fail_without(const std::vector<AbsentRank>& left) {
  fail(fmt::format("{} expected {} ranks, got: {}; {}", where(), rank_.size(), absent_text(left),
                   call_.text));
}

bool MessageRank::Messages::has_left(int rank) const {
  return rank_.shared_->has_left(rank_.world_rank(rank));
}

bool MessageRank::Messages::is_done(Posted& posted, std::chrono::milliseconds time) {
  if (posted.transfer == nullptr) return true;
  try {
    if (!posted.transfer->wait_for(time)) return false;
  } catch (const CommError& error) {
    fail_at(posted.rank, error.what());
  }
  posted.transfer.reset();
  if (posted.early != nullptr) {
    std::memcpy(posted.place, posted.early->data(), posted.early->size());
  }
  return true;
}

std::string MessageRank::Messages::where() const {
  return fmt::format("[{} #{} of {}]", call_.op, call_.sequence, rank_.name_);
}

void MessageRank::Messages::fail_at(int rank, std::string_view why) {
  wait_for_word(kPatience, rank);  // a lost process ends its messages at once
  fail(fmt::format("{} expected messages of rank {}, got {}; {}", where(), rank_.world_rank(rank),
                   why, call_.text));
}

void MessageRank::Messages::wait_for_word(std::chrono::milliseconds time, int rank) {
  constexpr std::chrono::milliseconds kSleep(10);
  for (std::chrono::milliseconds slept{0}; slept < time; slept += kSleep) {
    rank_.world().check();
    if (rank >= 0 && has_left(rank)) {
      fail_without({{rank_.world_rank(rank), true, rank_.last_of(rank)}});
    }
    std::this_thread::sleep_for(kSleep);
  }
}

void MessageRank::Messages::fail(std::string message) {
  rank_.world().fail(message);
  rank_.world().check();  // what it failed with first
  throw CommError(message);
}

}  // namespace tessera::comm
