#include "comm/control/client.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>
#include <utility>

#include "comm/control/beat.h"
#include "comm/world/futex.h"
#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::comm::control {

using engine::CommError;
using engine::require;
using std::chrono::steady_clock;

namespace {

constexpr std::size_t kMaxCallNbytes = 200;
}  // namespace

Client::Client(int process, int num_ranks, std::chrono::milliseconds deadline,
               Connection connection, std::vector<std::string> names)
    : process_(process),
      silence_limit_(silence_limit(deadline)),
      names_(std::move(names)),
      connection_(std::move(connection)),
      calls_(names_.size()),
      has_left_(names_.size()),
      own_calls_(static_cast<std::size_t>(num_ranks)) {
  for (RankCall& call : own_calls_) call.text.reserve(kMaxCallNbytes);
  thread_ = std::thread([this] { run(); });
}

std::size_t Client::index(int process) const {
  require(process >= 0 && process < num_processes(),
          "[control] expected a process in [0, {}), got {}", num_processes(), process);
  return static_cast<std::size_t>(process);
}

void Client::changed() noexcept {
  ++num_changes_;
  wake_all(num_changes_);
  wake_.wake();
}

std::vector<std::string> Client::all_gather(std::string_view label, std::string own) {
  require(own.size() <= Control::kMaxGatherNbytes && label.size() <= kMaxMessageNbytes,
          "[control] expected at most {} bytes to gather, got {} ({})", Control::kMaxGatherNbytes,
          own.size(), engine::excerpt(label));
  const std::lock_guard one(gather_mutex_);
  Bytes frame = bytes_of(
      Gather{.sequence = sequence_++, .label = std::string(label), .text = std::move(own)});
  {
    const std::lock_guard lock(mutex_);
    gathered_.reset();
    to_send_.push_back(std::move(frame));
  }
  changed();
  for (;;) {
    const std::uint32_t before = num_changes_;
    {
      const std::lock_guard lock(mutex_);
      if (gathered_) return *std::exchange(gathered_, std::nullopt);
      if (!failure_ && has_left_[0]) {
        fail_locked(
            fmt::format("[control] expected all_gather '{}' of {} processes, got none of "
                        "{}, which has left",
                        label, num_processes(), names_[0]));
      }
      if (failure_) throw CommError(*failure_);
    }
    wait_while(num_changes_, before);
  }
}

void Client::fail(std::string message) noexcept {
  const auto limit = steady_clock::now() + Control::kPatience;
  try {
    message.resize(std::min(message.size(), kMaxMessageNbytes));
    message = engine::without_cut_character(message);
    Bytes frame = bytes_of(Failure{message});
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    to_send_.push_back(std::move(frame));
  } catch (const std::bad_alloc&) {
    // The others find that this process's connection has ended.
    const std::lock_guard lock(mutex_);
    is_broken_ = true;
    fail_locked("no memory left");  // short enough to need none
  }
  changed();
  if (!wait_for_failure(limit)) {
    const std::lock_guard lock(mutex_);
    fail_locked(std::move(message));
  }
  changed();
}

std::optional<std::string> Client::failure_within(std::chrono::milliseconds time) const {
  (void)wait_for_failure(steady_clock::now() + time);
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool Client::has_failed() const noexcept {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

bool Client::wait_for_failure(net::Time limit) const noexcept {
  for (;;) {
    const std::uint32_t before = num_changes_;
    {
      const std::lock_guard lock(mutex_);
      if (failure_ || steady_clock::now() >= limit || has_left_[0]) return failure_.has_value();
    }
    wait_while(num_changes_, before, limit);
  }
}

void Client::fail_locked(std::string message) {
  if (!failure_) failure_ = std::move(message);
}

void Client::listen(Control::Events events) {
  {
    const std::lock_guard lock(mutex_);
    require(!events_, "[control] expected one who listens, got another");
    events_ = std::move(events);
  }
  changed();
}

void Client::change_pauses(int change) noexcept {
  {
    const std::lock_guard lock(mutex_);
    num_pauses_ += change;
  }
  changed();
}

void Client::say_call(std::string_view text, int rank) noexcept {
  const std::lock_guard lock(mutex_);
  own_calls_[static_cast<std::size_t>(rank)].text =
      engine::without_cut_character(text.substr(0, kMaxCallNbytes));
}

void Client::say_left(int rank) noexcept {
  {
    const std::lock_guard lock(mutex_);
    own_calls_[static_cast<std::size_t>(rank)].has_left = true;
    has_rank_left_ = true;
  }
  changed();
}

const RankCall* Client::find_call(int process, int rank) const {
  const auto& calls = process == process_ ? own_calls_ : calls_[index(process)];
  const auto r = static_cast<std::size_t>(rank);
  return r < calls.size() ? &calls[r] : nullptr;
}

bool Client::has_left(int process, int rank) const {
  const std::lock_guard lock(mutex_);
  const RankCall* const call = find_call(process, rank);
  return has_left_[index(process)] || (call != nullptr && call->has_left);
}

std::string Client::last_call(int process, int rank) const {
  const std::lock_guard lock(mutex_);
  const RankCall* const call = find_call(process, rank);
  if (call == nullptr) return "";
  return process == process_ ? engine::excerpt(call->text) : call->text;  // as others have it
}

void Client::leave() {
  {
    const std::lock_guard lock(mutex_);
    is_leaving_ = true;
  }
  changed();
  thread_.join();
}

void Client::run() {
  while (take_orders()) {
    pollfd polls[2] = {wake_.to_poll(), {}};
    if (connection_) {
      connection_->flush();
      polls[1] = {.fd = connection_->socket().get(), .events = connection_->events(), .revents = 0};
    }
    (void)poll(polls, connection_ ? 2 : 1, static_cast<int>(DeadlineClock::kTick.count()));
    wake_.clear();
    if (connection_) take_words();
    if (connection_) watch();
    tell_events();
  }
}

bool Client::take_orders() {
  const auto now = steady_clock::now();
  const std::lock_guard lock(mutex_);
  if (is_broken_) connection_.reset();
  if (connection_ && !has_said_left_) {
    for (Bytes& frame : to_send_) connection_->queue(std::move(frame));
    if (has_said_paused_ != (num_pauses_ > 0)) {
      has_said_paused_ = num_pauses_ > 0;
      connection_->queue(Pause{has_said_paused_});
    }
    if (now >= next_beat_ || is_leaving_ || has_rank_left_) {
      has_rank_left_ = false;
      next_beat_ = now + kBeatInterval;
      connection_->queue(Beat{.text = {}, .calls = own_calls_});
    }
    if (is_leaving_) {
      connection_->queue(Left{process_});
      has_said_left_ = true;
      leave_limit_ = now + Control::kPatience;
    }
  }
  to_send_.clear();
  // Process 0 closes the connection when it has heard.
  return !is_leaving_ || (connection_ && now < leave_limit_);
}

void Client::take_words() {
  if (connection_->receive()) heard_ = clock_.now();
  try {
    while (connection_) {
      auto frame = connection_->next();
      if (!frame) break;
      hear(std::move(*frame));
    }
  } catch (const engine::Error& error) {
    return lose_server(fmt::format("which said what it must not: {}", error.what()));
  }
  if (connection_ && connection_->ended()) lose_server(connection_->end_text());
}

void Client::hear(Frame frame) {
  {
    const std::lock_guard lock(mutex_);
    if (auto* gathered = std::get_if<Gathered>(&frame)) {
      gathered_ = std::move(gathered->texts);
    } else if (auto* calls = std::get_if<Calls>(&frame)) {
      for (auto& call : calls->calls) calls_[index(call.process)] = std::move(call.calls);
    } else if (auto* failure = std::get_if<Failure>(&frame)) {
      fail_locked(std::move(failure->message));
      connection_.reset();  // process 0 knows by this that it has arrived
    } else if (const auto* pause = std::get_if<Pause>(&frame)) {
      is_paused_ = pause->paused;
    } else if (const auto* left = std::get_if<Left>(&frame)) {
      has_left_[index(left->process)] = true;
      // It waits for that as well.
      if (left->process == 0) connection_.reset();
    } else {
      engine::fail<CommError>("[control] expected another frame, got kind {}", frame.index());
    }
    if (!connection_) is_paused_ = false;
  }
  changed();
}

void Client::watch() {
  if (clock_.now() - heard_ <= silence_limit_) return;
  lose_server(fmt::format("which does not answer ({} ms without a word)", silence_limit_.count()));
}

void Client::lose_server(const std::string& how) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_said_left_) {
      fail_locked(fmt::format("[control] expected {} processes, lost {}, {}; {}", num_processes(),
                              names_[0], how, last_call_text(calls_[0])));
      // For when it can hear again.
      connection_->queue(Failure{*failure_});
      connection_->flush();
    }
    connection_.reset();
    is_paused_ = false;
  }
  changed();
}

void Client::tell_events() {
  std::unique_lock lock(mutex_);
  if (!events_ || is_leaving_) return;
  // Set once, so nobody changes it meanwhile.
  const Control::Events& events = *events_;
  const bool is_paused = is_paused_;
  const bool has_failed = failure_.has_value();
  lock.unlock();
  if (std::exchange(is_pause_told_, is_paused) != is_paused && events.on_pause) {
    events.on_pause(is_paused);
  }
  if (has_failed && !std::exchange(is_failure_told_, true) && events.on_failure) {
    events.on_failure(*failure_);
  }
}

}  // namespace tessera::comm::control
