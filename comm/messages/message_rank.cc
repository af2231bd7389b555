#include "comm/messages/message_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/messages/messages.h"
#include "engine/error.h"

namespace tessera::comm {

MessageRank::MessageRank(std::shared_ptr<MessageWorld> shared, std::string name,
                         std::vector<GroupProcess> processes, FlightRecorder* flight)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      processes_(std::move(processes)),
      rank_(static_cast<int>(
          std::ranges::find(processes_, shared_->transport->process(), &GroupProcess::process) -
          processes_.begin())),
      num_ranks_(static_cast<int>(ranks_of(processes_).size())),
      last_(processes_.size()) {
  for (const GroupProcess& p : processes_) {
    engine::require(p.number < static_cast<int>(kNumGroups),
                    "[split] expected at most {} groups in a world, got more ({} of {})",
                    kNumGroups, ranks_text(p.ranks), name_);
  }
  if (flight != nullptr) {
    flight_group_ = flight->add_group(name_, ranks_of(processes_));
    ring_ = &flight->ring(world_rank(rank_));
  }
}

Call MessageRank::next_call(const FlightCall& what, std::string text) {
  const std::int64_t sequence = sequence_++;
  text = declared_.before(std::move(text));
  shared_->peers.say_call(fmt::format("#{} {} of {}", sequence, text, name_));
  FlightTicket flight;
  if (ring_ != nullptr) flight = {*ring_, ring_->called(flight_group_, sequence, what)};
  return {.sequence = sequence, .op = what.op, .text = std::move(text), .flight = flight};
}

void MessageRank::declare(std::string_view what) {
  declared_.add(what);
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
  const SplitPlace own{.color = color, .key = key, .number = next_number()};
  Messages messages(*this, call, nullptr);
  messages.meet();
  Part part{.name = fmt::format("{}:{}", name_, color), .processes = {}};
  part.processes = split_processes(processes_, messages.exchange({&own, 1}), color, part.name);
  return part;
}

void MessageRank::add_absent(int rank, bool departed, std::vector<AbsentRank>& absent) const {
  const std::lock_guard lock(mutex_);
  const std::optional<Fingerprint>& last = last_[static_cast<std::size_t>(rank)];
  for (const int r : ranks(rank)) {
    absent.push_back({.rank = r, .departed = departed, .last = last ? last->str() : "nothing"});
  }
}

void MessageRank::came_to(int rank, const Fingerprint& call) {
  const std::lock_guard lock(mutex_);
  last_[static_cast<std::size_t>(rank)] = call;
}

}  // namespace tessera::comm
