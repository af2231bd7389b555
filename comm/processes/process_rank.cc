#include "comm/processes/process_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <span>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "comm/world/ranks_text.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "engine/philox.h"

namespace tessera::comm {

using engine::CommError;

namespace {

constexpr std::size_t kMaxSaid = 256;

}  // namespace

// What a rank says in an exchange.
struct ProcessRank::Record {
  std::uint64_t hash = 0;  // of all calls up to this one
  std::int64_t sequence = 0;
  int color = 0;
  int key = 0;
  std::array<std::byte, kMaxMessage> message = {};  // for the part that this rank is the first of
  char last[128] = {};                              // the last collective, cut
};

std::size_t ProcessRank::record_nbytes() {
  static_assert(std::is_trivially_copyable_v<Record>);
  return sizeof(Record);
}

ProcessRank::ProcessRank(std::shared_ptr<World> world, Peers peers, std::string name,
                         std::vector<int> members, int rank, Exchange& exchange)
    : world_(std::move(world)),
      peers_(std::move(peers)),
      name_(std::move(name)),
      members_(std::move(members)),
      rank_(rank),
      exchange_(exchange),
      hash_(engine::fnv1a("")) {
  if (FlightRecorder* flight = world_->flight()) {
    flight_group_ = flight->only_group(name_, members_);
    ring_ = &flight->ring(world_rank(rank_));
  }
}

Call ProcessRank::next_call(const FlightCall& what, std::string text) {
  const std::int64_t sequence = sequence_++;
  std::string said = fmt::format("#{} {} of {}", sequence, text, name_);
  peers_.say_call(said);
  {
    const std::lock_guard lock(mutex_);
    said_.push_back(std::move(said));
    if (said_.size() > kMaxSaid) said_.pop_front();
  }
  FlightTicket flight;
  if (ring_ != nullptr) flight = {*ring_, ring_->called(flight_group_, sequence, what)};
  return {.sequence = sequence, .op = what.op, .text = std::move(text), .flight = flight};
}

Call ProcessRank::announce(const FlightCall& what, std::string text) {
  Call call = next_call(what, std::move(text));
  last_ = fmt::format("#{} {}", call.sequence, call.text);
  hash_ = engine::fnv1a("\n", engine::fnv1a(last_, hash_));
  return call;
}

bool ProcessRank::watch(const Call& call, bool is_late) {
  std::string text = without_departed(call);
  if (text.empty()) text = difference();
  if (!text.empty()) {
    world_->fail(std::move(text));
    return true;
  }
  if (!is_late) return false;
  world_->wait_for_word();  // a process that has stopped is found elsewhere at about this time
  world_->fail(late(call));
  return true;
}

// Whether `last`, what a rank called last, is a call of this group, and its number.
std::optional<std::int64_t> ProcessRank::number_here(std::string_view last) const {
  const std::string end = " of " + name_;
  std::int64_t number = 0;
  const char* const text_end = last.data() + last.size();
  if (!last.starts_with('#') || !last.ends_with(end)) return std::nullopt;
  if (std::from_chars(last.data() + 1, text_end, number).ec != std::errc()) return std::nullopt;
  return number;
}

// Ranks that have not come to `call`, as far as is known; of these, those that have `departed`.
std::vector<AbsentRank> ProcessRank::absent(const Call& call, bool departed) const {
  std::vector<AbsentRank> ranks;
  for (int r = 0; r < size(); ++r) {
    const int rank = world_rank(r);
    const bool has_left = r != rank_ && peers_.has_left(rank);
    if (r == rank_ || (departed && !has_left)) continue;
    const std::string last = peers_.last_call(rank);
    const auto number = number_here(last);
    // One that has left may have come to it before it called something of another group.
    if (number ? *number >= call.sequence : departed && !last.empty()) continue;
    ranks.push_back({.rank = rank, .departed = has_left, .last = last.empty() ? "nothing" : last});
  }
  return ranks;
}

std::string ProcessRank::without_departed(const Call& call) const {
  const auto left = absent(call, true);
  if (left.empty()) return "";
  return fmt::format("{} expected {} ranks, got: {}; {}", where(call), size(), absent_text(left),
                     call.text);
}

// Of another rank's last call to this rank's with that number; empty: there is none, as far as is
// known.
std::string ProcessRank::difference() const {
  const std::lock_guard lock(mutex_);
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const std::string his = peers_.last_call(world_rank(r));
    const auto number = number_here(his);
    if (!number) continue;
    const auto mine = std::ranges::find_if(
        said_, [&](const std::string& said) { return number_here(said) == number; });
    if (mine == said_.end() || engine::escaped(*mine) == his) continue;
    const auto side = [&](const std::string& said) {
      return std::string_view(said).substr(0, said.size() - name_.size() - std::strlen(" of "));
    };
    const bool is_first = r < rank_;
    return fmt::format("[#{} of {}] expected rank {}'s {}, got rank {}'s {}", *number, name_,
                       world_rank(is_first ? r : rank_), side(is_first ? his : *mine),
                       world_rank(is_first ? rank_ : r), side(is_first ? *mine : his));
  }
  return "";
}

std::string ProcessRank::late(const Call& call) const {
  const auto ranks = absent(call, false);
  return fmt::format("{} expected {} ranks within {} ms, got no end of it: {}; {} (rank {} of {})",
                     where(call), size(), world_->deadline().count(),
                     ranks.empty() ? "all have called it" : absent_text(ranks), call.text,
                     world_rank(rank_), name_);
}

void ProcessRank::check() { end_agree(false); }

void ProcessRank::agree(const engine::Stream& stream) {
  end_agree(true);
  const Call call = next_call({.op = "agree"}, "agree");
  call.flight.enter(FlightState::kStarted);
  begin({}, call, &stream);
  agreeing_ = call;
}

void ProcessRank::declare(std::string_view what) {
  announce({.op = "declare", .label = what}, std::string(what))
      .flight.enter(FlightState::kFinished);
}

void ProcessRank::barrier(std::string_view label) {
  const Call call = announce({.op = "barrier", .label = label}, fmt::format("barrier '{}'", label));
  compare(exchange({}, call), call);
}

ProcessRank::Part ProcessRank::split(int color, int key, const std::function<Message()>& message) {
  const auto at = [](const std::vector<Record>& records, int rank) -> const Record& {
    return records[static_cast<std::size_t>(rank)];
  };
  const Call call = announce({.op = "split"}, "split");
  const auto records = exchange({.color = color, .key = key}, call);
  compare(records, call);
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (at(records, r).color == color) ranks.push_back(r);
  }
  std::ranges::stable_sort(ranks, {}, [&](int r) { return at(records, r).key; });

  Record own;
  if (ranks[0] == rank_) {
    const Message said = message();
    engine::require(said.size() <= kMaxMessage, "[split] expected at most {} bytes, got {}",
                    kMaxMessage, said.size());
    std::ranges::copy(said, own.message.begin());
  }
  const auto heard = at(exchange(own, call), ranks[0]).message;
  // Two splits of one group may have equal colors.
  const std::string nth = ++num_splits_ == 1 ? "" : fmt::format("/{}", num_splits_);
  Part part{.name = fmt::format("{}:{}{}", name_, color, nth),
            .members = {},
            .rank = static_cast<int>(std::ranges::find(ranks, rank_) - ranks.begin()),
            .message = {heard.begin(), heard.end()}};
  for (const int r : ranks) part.members.push_back(world_rank(r));
  return part;
}

void ProcessRank::begin(Record record, const Call& call, const engine::Stream* stream) {
  world_->check();
  record.hash = hash_;
  record.sequence = sequence_;
  last_.copy(record.last, sizeof(record.last) - 1);
  try {
    exchange_.begin(std::as_bytes(std::span(&record, 1)), stream);
  } catch (const CommError& error) {
    if (!watch(call, false)) {
      world_->abort(
          fmt::format("{} rank {} failed: {}", where(call), world_rank(rank_), error.what()));
    }
    exchange_.release();
    world_->check();
  }
}

std::vector<ProcessRank::Record> ProcessRank::end(const Call& call) {
  constexpr std::chrono::microseconds kSleep(50);
  constexpr int kSleepsPerLook = 200;
  const auto limit = world_->time_limit();
  std::span<const std::byte> bytes;
  for (int i = 0; (bytes = exchange_.answers()).empty(); ++i) {
    world_->check();
    const bool is_late = world_->clock().now() >= limit;
    if ((is_late || i % kSleepsPerLook == 0) && watch(call, is_late)) exchange_.release();
    std::this_thread::sleep_for(kSleep);
  }
  world_->check();  // or it was released without an answer
  std::vector<Record> records(members_.size());
  engine::require<CommError>(bytes.size() == records.size() * sizeof(Record),
                             "{} expected {} bytes of each rank, got {} of all", where(call),
                             sizeof(Record), bytes.size());
  std::memcpy(records.data(), bytes.data(), bytes.size());
  call.flight.enter(FlightState::kFinished);
  return records;
}

std::vector<ProcessRank::Record> ProcessRank::exchange(const Record& record, const Call& call) {
  end_agree(true);
  call.flight.enter(FlightState::kStarted);
  begin(record, call, nullptr);
  return end(call);
}

void ProcessRank::end_agree(bool wait) {
  if (!agreeing_ || (!wait && exchange_.answers().empty())) return;
  const Call call = *std::exchange(agreeing_, std::nullopt);
  compare(end(call), call);
}

void ProcessRank::compare(const std::vector<Record>& records, const Call& call) {
  const auto differs = [&](const Record& r) {
    return r.hash != records[0].hash || r.sequence != records[0].sequence;
  };
  const auto found = std::ranges::find_if(records, differs);
  if (found == records.end()) return;
  const auto rank = static_cast<int>(found - records.begin());
  fail(fmt::format("{} expected rank {}'s calls up to {}, got rank {}'s up to {}", where(call),
                   world_rank(0), std::string(records[0].last), world_rank(rank),
                   std::string(found->last)));
}

void ProcessRank::fail(std::string message) {
  world_->fail(std::move(message));
  exchange_.release();
  world_->check();
}

std::string ProcessRank::where(const Call& call) const {
  return fmt::format("[{} #{} of {}]", call.op, call.sequence, name_);
}

}  // namespace tessera::comm
