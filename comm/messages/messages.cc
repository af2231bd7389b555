#include "comm/messages/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "comm/flight_recorder.h"
#include "comm/messages/fingerprint.h"
#include "comm/world/ranks_text.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;

// For what is on its way already.
constexpr std::chrono::milliseconds kPatience(1000);

// Which rank of the world was waited for longest.
struct Waits {
  // What comes sooner was there, or as good as.
  static constexpr std::chrono::microseconds kNoWait{100};

  void waited(int rank, std::chrono::nanoseconds time) {
    if (time <= std::max<std::chrono::nanoseconds>(longest, kNoWait)) return;
    late = rank;
    longest = time;
  }
  // As fingerprints are looked at one after the other.
  void came(int rank) {
    const auto now = std::chrono::steady_clock::now();
    waited(rank, now - std::exchange(seen, now));
  }

  std::chrono::steady_clock::time_point seen = std::chrono::steady_clock::now();
  int late = -1;  // nobody
  std::chrono::nanoseconds longest{0};
};

}  // namespace

Messages::Messages(MessageRank& rank, const Call& call, std::shared_ptr<const void> owner)
    : rank_(rank), call_(call), owner_(std::move(owner)) {
  call_.flight.enter(FlightState::kStarted);
}

Messages::~Messages() {
  const bool failed = std::uncaught_exceptions() > num_exceptions_;
  call_.flight.enter(failed ? FlightState::kFailed : FlightState::kFinished);
}

void Messages::meet() {
  rank_.world().check();  // for groups of one rank, too
  const auto at = [](int r) { return static_cast<std::size_t>(r); };
  const auto all = std::make_shared<std::vector<Fingerprint>>(at(rank_.size()));
  Fingerprint& mine = (*all)[at(rank_.rank())] = Fingerprint(call_);
  mine.last_rank = last_here_.rank;
  std::vector<Posted> early = std::exchange(posted_, {});
  for (const bool sends : {false, true}) {
    for (int r = 0; r < rank_.size(); ++r) {
      Fingerprint& fingerprint = sends ? mine : (*all)[at(r)];
      post(r, sends, kAhead, std::as_writable_bytes(std::span(&fingerprint, 1)), all);
    }
  }
  Waits waits;
  waits.waited(last_here_.rank, last_here_.waited);
  await([&](int r) {
    waits.came(late_rank(r, (*all)[at(r)]));
    rank_.came_to(r, (*all)[at(r)]);
  });
  if (FlightRecorder* flight = rank_.world().flight(); flight != nullptr && rank_.size() > 1) {
    flight->met(waits.late, waits.longest.count());
  }
  const Fingerprint& first = (*all)[0];
  const auto other =
      std::ranges::find_if_not(*all, [&](const Fingerprint& f) { return f.is_same_call(first); });
  if (other == all->end()) {
    has_met_ = true;
    posted_ = std::move(early);
    return;
  }
  const std::string_view text = first.what();
  fail(fmt::format("[{} #{} of {}] expected rank {}'s {}, got rank {}'s {}{}",
                   text.substr(0, text.find(' ')), first.sequence, rank_.name_, rank_.world_rank(0),
                   text, rank_.world_rank(static_cast<int>(other - all->begin())),
                   other->sequence == first.sequence ? "" : fmt::format("#{} ", other->sequence),
                   other->what()));
}

std::vector<SplitPlace> Messages::exchange(std::span<const SplitPlace> own) {
  const auto sent = std::make_shared<std::vector<SplitPlace>>(own.begin(), own.end());
  const auto all = std::make_shared<std::vector<SplitPlace>>(rank_.num_ranks_);
  auto begin = all->begin();
  for (int r = 0; r < rank_.size(); ++r) {
    if (r == rank_.rank()) std::ranges::copy(own, begin);
    const std::span from(begin, rank_.ranks(r).size());
    post(r, false, kMoves, std::as_writable_bytes(from), all);
    post(r, true, kMoves, std::as_writable_bytes(std::span(*sent)), sent);
    begin += std::ssize(from);
  }
  await([](int) {});
  return *all;
}

std::size_t Messages::send(int rank, const void* bytes, std::int64_t nbytes, Lane lane) {
  // A transport does not write what it sends.
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(bytes));
  return post(rank, true, lane, {begin, static_cast<std::size_t>(nbytes)}, owner_);
}

std::size_t Messages::receive(int rank, void* bytes, std::int64_t nbytes, Lane lane) {
  const auto size = static_cast<std::size_t>(nbytes);
  if (has_met_) return post(rank, false, lane, {static_cast<std::byte*>(bytes), size}, owner_);
  const auto early = std::make_shared<std::vector<std::byte>>(size);
  const std::size_t message = post(rank, false, lane, *early, early);
  posted_[message].early = early;
  posted_[message].place = bytes;
  return message;
}

std::size_t Messages::post(int rank, bool sends, Lane lane, std::span<std::byte> bytes,
                           const std::shared_ptr<const void>& owner) {
  Posted posted{.rank = rank, .sends = sends, .transfer = nullptr};
  if (rank != rank_.rank() && !bytes.empty()) {
    rank_.world().check();
    constexpr std::uint32_t kNumCalls = MessageRank::kNumCalls;
    const auto call = static_cast<std::uint32_t>(call_.sequence) % kNumCalls;
    const auto number = static_cast<std::uint32_t>(rank_.at(sends ? rank : rank_.rank()).number);
    const std::uint32_t tag = (number * kNumCalls + call) * 2 + lane;
    Transport& transport = *rank_.shared_->transport;
    const int process = rank_.at(rank).process;
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

void Messages::await(const std::function<void(int rank)>& received) {
  const auto limit = rank_.world().time_limit();
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    if (posted_[i].transfer == nullptr) continue;
    await_one(i, limit);
    if (!posted_[i].sends) received(posted_[i].rank);
  }
  posted_.clear();
}

void Messages::wait(std::size_t message) { await_one(message, rank_.world().time_limit()); }

void Messages::await_one(std::size_t i, DeadlineClock::time_point limit) {
  World& world = rank_.world();
  while (!is_done(posted_[i], DeadlineClock::kTick)) {
    world.check();
    if (const auto left = pending_ranks(i, true); !left.empty()) fail_without(left);
    if (world.clock().now() >= limit) expire(i);
  }
}

std::vector<AbsentRank> Messages::pending_ranks(std::size_t first, bool departed) {
  std::vector<AbsentRank> ranks;
  for (std::size_t i = first; i < posted_.size(); ++i) {
    const int rank = posted_[i].rank;
    if (departed && !rank_.has_left(rank)) continue;
    // What it sent before it left may come later than the word that it has left.
    const bool waits = departed && ranks.empty();
    if (is_done(posted_[i], waits ? kPatience : std::chrono::milliseconds(0))) continue;
    const bool is_known =
        std::ranges::find(ranks, rank_.world_rank(rank), &AbsentRank::rank) != ranks.end();
    if (!is_known) rank_.add_absent(rank, departed, ranks);
  }
  return ranks;
}

void Messages::expire(std::size_t first) {
  // A process that has stopped is found elsewhere at about this time. It keeps others from going
  // on, who look from here as if it were they.
  rank_.world().wait_for_word();
  const std::vector<AbsentRank> ranks = pending_ranks(first, false);
  fail(fmt::format("{} expected {} ranks within {} ms, got {}: {}; {}", where(), rank_.num_ranks_,
                   rank_.world().deadline().count(),
                   rank_.num_ranks_ - static_cast<int>(ranks.size()),
                   ranks.empty() ? "the last came too late" : absent_text(ranks), call_.text));
}

void Messages::fail_without(const std::vector<AbsentRank>& left) {
  fail(fmt::format("{} expected {} ranks, got: {}; {}", where(), rank_.num_ranks_,
                   absent_text(left), call_.text));
}

bool Messages::is_done(Posted& posted, std::chrono::milliseconds time) {
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

// Whom a process was late for: the first of its ranks if it does not say.
int Messages::late_rank(int rank, const Fingerprint& his) const {
  const std::vector<int>& ranks = rank_.ranks(rank);
  return std::ranges::find(ranks, his.last_rank) == ranks.end() ? ranks.front() : his.last_rank;
}

std::string Messages::where() const {
  return fmt::format("[{} #{} of {}]", call_.op, call_.sequence, rank_.name_);
}

void Messages::fail_at(int rank, std::string_view why) {
  // A lost process ends its messages at once, and so does one that leaves.
  rank_.world().wait_for_word([&] {
    if (!rank_.has_left(rank)) return;
    std::vector<AbsentRank> left;
    rank_.add_absent(rank, true, left);
    fail_without(left);
  });
  fail(fmt::format("{} expected messages of {}, got {}; {}", where(), ranks_text(rank_.ranks(rank)),
                   why, call_.text));
}

void Messages::fail(std::string message) {
  rank_.world().fail(message);
  rank_.world().check();  // what it failed with first
  throw CommError(message);
}

}  // namespace tessera::comm
