#include "comm/control/server.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "comm/control/beat.h"
#include "comm/control/control.h"
#include "comm/world/ranks_text.h"
#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::comm::control {

using engine::CommError;
using engine::require;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// How long others are waited for at an end where they have got everything.
constexpr std::chrono::seconds kLastWords{1};
static_assert(Control::kPatience > kLastWords + 2 * DeadlineClock::kTick);
// How long those are waited for who have not come yet.
constexpr std::chrono::seconds kLastWordsToLate{2};

}  // namespace

Server::Server(ServerOptions options, Door door)
    : options_(std::move(options)),
      door_(std::move(door)),
      members_(num_processes_),
      gathering_(num_processes_),
      join_limit_(watch_.now() + deadline_),
      reminder_(deadline_) {
  if (!options_.failure.empty()) fail(options_.failure);
  thread_ = std::thread([this] { run(); });
}

Server::~Server() {
  stopped_at_ = steady_clock::now();
  is_stopping_.store(true, std::memory_order_release);
  wake_.wake();
  thread_.join();
}

void Server::run() {
  while (!is_done()) {
    wait();
    for (int p = 0; p < num_processes_; ++p) hear(p);
    if (!has_begun_) {
      let_in();
      check_join();
    } else {
      check_silence();
      check_gathering();
    }
    change_pauses();
    beat();
    // Told last: its process may end then.
    if (failure_ && !is_own_told_ && members_[0].connection &&
        (members_.are_others_gone() || steady_clock::now() > failed_at_ + kLastWords)) {
      members_[0].connection->queue(Failure{*failure_});
      is_own_told_ = true;
    }
    for (Member& member : members_) {
      if (member.connection && member.connection->flush()) sent_at_ = steady_clock::now();
    }
  }
}

void Server::wait() {
  std::vector<pollfd> polls = {wake_.to_poll()};
  if (!has_begun_) door_.poll_for(polls);
  for (const Member& member : members_) {
    if (!member.connection) continue;
    polls.push_back({.fd = member.connection->socket().get(),
                     .events = member.connection->events(),
                     .revents = 0});
  }
  (void)poll(polls.data(), polls.size(), static_cast<int>(DeadlineClock::kTick.count()));
  wake_.clear();
}

bool Server::is_done() {
  if (!is_stopping_.load(std::memory_order_acquire)) return false;
  if (failure_ && !has_begun_ && !members_.have_all_come()) {
    return steady_clock::now() > stopped_at_ + kLastWordsToLate;
  }
  // While others take what they have still to be sent, such as the last gather, they are waited
  // for. One that takes nothing is lost by its silence.
  const bool owes = !failure_ && members_.is_one_owed();
  return members_.are_gone() ||
         steady_clock::now() > (owes ? std::max(stopped_at_, sent_at_) + silence_limit(deadline_)
                                     : stopped_at_ + kLastWords);
}

void Server::let_in() {
  for (Guest& guest : door_.hear()) {
    Member& member = members_[guest.process];
    if (member.connection) hear(guest.process);  // it may have ended since
    if (member.connection) {
      door_.refuse(guest,
                   fmt::format("one process {}, got two: {} is there", guest.process, member.name));
      continue;
    }
    member = Member{.connection = std::move(guest.connection), .name = std::move(guest.name)};
    next_beat_ = {};
    if (failure_) {
      member.connection->queue(Failure{*failure_});
    } else if (!guest.failure.empty()) {
      fail(std::move(guest.failure));
    }
  }
}

void Server::hear(int process) {
  Member& member = members_[process];
  if (!member.connection) return;
  if (member.connection->receive()) member.heard = watch_.now();
  try {
    while (member.connection) {
      auto frame = member.connection->next();
      if (!frame) break;
      handle(process, std::move(*frame));
    }
  } catch (const CommError& error) {
    return lose(process, fmt::format("which said what it must not: {}", error.what()));
  }
  if (member.connection && member.connection->ended()) {
    lose(process, member.connection->end_text());
  }
}

void Server::handle(int process, Frame frame) {
  Member& member = members_[process];
  require<CommError>(has_begun_, "[control] expected nothing yet, got kind {}", frame.index());
  if (auto* beat = std::get_if<Beat>(&frame)) {
    for (RankCall& call : beat->calls) call.text = engine::excerpt(call.text);
    const auto num_left = [](const auto& calls) {
      return std::ranges::count(calls, true, &RankCall::has_left);
    };
    if (num_left(beat->calls) > num_left(member.calls)) next_beat_ = {};  // others may wait for it
    member.is_call_news |= beat->calls != member.calls;
    member.calls = std::move(beat->calls);
  } else if (auto* gather = std::get_if<Gather>(&frame)) {
    handle(process, std::move(*gather));
  } else if (auto* failure = std::get_if<Failure>(&frame)) {
    fail(std::move(failure->message));
  } else if (const auto* pause = std::get_if<Pause>(&frame)) {
    member.is_paused = pause->paused;
  } else if (std::holds_alternative<Left>(frame)) {
    member.connection.reset();
    member.has_left = true;
    member.is_paused = false;
    next_beat_ = {};
    this->beat();  // whoever knows that it has left knows its last call
    members_.tell_all(Left{process});
    check_left();
  } else {
    engine::fail<CommError>("[control] expected another frame, got kind {}", frame.index());
  }
}

void Server::handle(int process, Gather gather) {
  if (failure_) return;
  if (!gathering_.has_begun()) gather_limit_ = clock_->now() + deadline_;
  if (gathering_.has_begun() && gather.label != gathering_.label()) {
    return fail(fmt::format(
        "[control] expected one all_gather of all processes, got '{}' of {} and '{}' of {}",
        gathering_.label(), members_[gathering_.first()].name, gather.label,
        members_[process].name));
  }
  gathering_.add(process, std::move(gather));
  if (gathering_.nbytes() > Control::kMaxGatherNbytes) {
    return fail(fmt::format("[control] expected at most {} bytes of all in all_gather '{}', got {}",
                            Control::kMaxGatherNbytes, gathering_.label(), gathering_.nbytes()));
  }
  check_left();
  if (!failure_ && gathering_.is_complete()) members_.tell_all(gathering_.take());
}

void Server::lose(int process, const std::string& how) {
  Member& member = members_[process];
  member.connection.reset();
  member.is_paused = false;
  if (!has_begun_) next_beat_ = {};
  // Those who hear that process 0 has left hang up.
  if (!has_begun_ || members_[0].has_left) return;
  fail(fmt::format("[control] expected {} processes, lost {}, {}; {}", num_processes_, member.name,
                   how, last_call_text(member.calls)));
}

void Server::check_left() {
  if (!gathering_.has_begun()) return;
  for (int p = 0; p < num_processes_; ++p) {
    const Member& member = members_[p];
    if (!member.has_left || gathering_.has(p)) continue;
    return fail(
        fmt::format("[control] expected all_gather '{}' of {} processes, got none of {}, which has "
                    "left; {}",
                    gathering_.label(), num_processes_, member.name, last_call_text(member.calls)));
  }
}

void Server::check_join() {
  if (failure_) return;
  const std::vector<int> missing = members_.missing();
  if (missing.empty()) {
    has_begun_ = true;
    door_.close();
    Go go;
    for (Member& member : members_) {
      go.names.push_back(member.name);
      member.heard = watch_.now();
    }
    return members_.tell_all(std::move(go));
  }
  if (options_.on_waiting && reminder_.is_due()) {
    options_.on_waiting(fmt::format("waiting for {} of {} processes at {}: {}", missing.size(),
                                    num_processes_, options_.place, processes_text(missing)));
  }
  if (watch_.now() < join_limit_) return;
  std::string message =
      fmt::format("[control] expected {} processes at {} within {} ms, got {}: missing {}",
                  num_processes_, options_.place, deadline_.count(),
                  num_processes_ - std::ssize(missing), processes_text(missing));
  if (!door_.last_note().empty()) message += "; " + door_.last_note();
  fail(std::move(message));
  has_begun_ = true;
  door_.close();
}

void Server::check_silence() {
  const auto now = watch_.now();
  const milliseconds limit = silence_limit(deadline_);
  for (int p = 0; p < num_processes_; ++p) {
    const Member& member = members_[p];
    if (failure_ || !member.connection || now - member.heard <= limit) continue;
    fail(
        fmt::format("[control] expected {} processes, lost {}, which does not answer ({} ms "
                    "without a word); {}",
                    num_processes_, member.name, limit.count(), last_call_text(member.calls)));
  }
}

void Server::check_gathering() {
  if (failure_ || !gathering_.has_begun() || clock_->now() < gather_limit_) return;
  std::string message =
      fmt::format("[control] expected all_gather '{}' of {} processes within {} ms, got none of ",
                  gathering_.label(), num_processes_, deadline_.count());
  constexpr int kMaxNames = 8;
  int num = 0;
  for (int p = 0; p < num_processes_; ++p) {
    if (gathering_.has(p) || ++num > kMaxNames) continue;
    message += fmt::format("{}{} ({})", num > 1 ? ", " : "", members_[p].name,
                           last_call_text(members_[p].calls));
  }
  if (num > kMaxNames) message += fmt::format(" and {} more", num - kMaxNames);
  fail(std::move(message));
}

void Server::beat() {
  const auto now = steady_clock::now();
  if (now < next_beat_ || failure_) return;
  next_beat_ = now + kBeatInterval;
  if (!has_begun_) {
    const std::vector<int> missing = members_.missing();
    return members_.tell_all(
        Beat{.text = fmt::format("{}: missing {}", num_processes_ - std::ssize(missing),
                                 processes_text(missing)),
             .calls = {}});
  }
  members_.tell_all(members_.take_news());
}

void Server::change_pauses() {
  const bool is_paused = members_.is_one_paused();
  if (is_paused == (pause_ != nullptr)) return;
  pause_ = is_paused ? DeadlineClock::pause(clock_) : nullptr;
  members_.tell_all(Pause{is_paused});
}

void Server::fail(std::string message) {
  if (failure_) return;
  message.resize(std::min(message.size(), kMaxMessageNbytes));
  failure_ = engine::without_cut_character(message);
  failed_at_ = steady_clock::now();
  members_.tell_all(Failure{*failure_}, 0);
}

}  // namespace tessera::comm::control
