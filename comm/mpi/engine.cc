#include "comm/mpi/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using std::chrono::microseconds;

// Who waits looks for so long without sleeping, and then sleeps between its looks, each time
// longer.
constexpr microseconds kWakefulness{50}, kFirstSleep{10}, kLongestSleep{100};
// How often the thread looks while messages are posted, and after so many looks without any. MPI
// may have work left for messages that are done on this side, such as the rest of a short one that
// a full socket did not take. So it looks when there are none, too.
constexpr microseconds kPause{5'000}, kIdlePause{100'000};
constexpr int kNumPauses = 20;

// Sleeps of 10 us would take 60.
class ExactSleeps {
 public:
  ExactSleeps() { prctl(PR_SET_TIMERSLACK, 1000UL); }  // ns
  ~ExactSleeps() { prctl(PR_SET_TIMERSLACK, slack_); }
  ExactSleeps(const ExactSleeps&) = delete;
  ExactSleeps& operator=(const ExactSleeps&) = delete;

 private:
  const unsigned long slack_ = static_cast<unsigned long>(prctl(PR_GET_TIMERSLACK));
};

}  // namespace

void MpiEngine::run() {
  try {
    library_->start();
    enter(kRunning);
    serve();
  } catch (...) {
    const std::lock_guard driver(driver_);
    give_up(std::current_exception());
  }
  enter(kEnded);
}

void MpiEngine::serve() {
  const ExactSleeps exact;
  int num_quiet = 0;
  microseconds sleep = kFirstSleep;
  while (true) {
    const std::uint32_t bell = bell_.load(std::memory_order_acquire);
    is_idle_ = num_quiet > kNumPauses;  // before the look, or a post after it would not be noticed
    bool stopped = false, orderly = false;
    {
      const std::lock_guard lock(mutex_);
      stopped = stopped_;
      orderly = orderly_ && error_ == nullptr;
    }
    std::unique_lock driver(driver_);
    look();
    if (stopped) {
      if (!pending_.empty()) {
        for_good_ = shared_from_this();
      } else if (orderly) {
        library_->finish();
      }
      return;
    }
    if (pending_.empty()) library_->progress();
    const bool hurries = num_alone_ > 0;
    const auto pause = num_quiet > kNumPauses && pending_.empty() ? kIdlePause : kPause;
    num_quiet = pending_.empty() ? num_quiet + 1 : 0;
    driver.unlock();
    // Slowly: two processes that wait for each other in turn would make each other's sleeps longer.
    sleep = hurries ? std::min(sleep + sleep / 4, kLongestSleep) : kFirstSleep;
    wait_while(bell_, bell, Clock::now() + (hurries ? sleep : pause));
  }
}

bool MpiEngine::drive() {
  const std::unique_lock driver(driver_, std::try_to_lock);
  if (!driver.owns_lock()) return false;
  try {
    look();
  } catch (...) {
    give_up(std::current_exception());
  }
  return true;
}

void MpiEngine::look() {
  std::size_t num_begun = pending_.size();
  {
    const std::lock_guard lock(mutex_);
    pending_.insert(pending_.end(), posts_.begin(), posts_.end());
    posts_.clear();
  }
  for (; num_begun < pending_.size(); ++num_begun) begin(*pending_[num_begun]);
  awaited_.clear();
  num_alone_ = 0;
  std::erase_if(pending_, [this](const auto& message) {
    if (has_ended(*message)) return true;
    if (message->is_alone) ++num_alone_;
    return false;
  });
}

void MpiEngine::wait_started(Clock::time_point deadline) {
  engine::require<CommError>(wait_while(phase_, kStarting, deadline),
                             "[mpi] expected MPI to start before the deadline, got no end of "
                             "MPI_Init_thread ({})",
                             library_->name());
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void MpiEngine::post(std::shared_ptr<MpiMessage> message) {
  message->requests.reserve(message->nbytes / chunk_nbytes_ + 1);
  {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr) std::rethrow_exception(error_);
    posts_.push_back(std::move(message));
  }
  if (is_idle_.exchange(false)) ring();
}

bool MpiEngine::wait(MpiMessage& message, Clock::time_point deadline) {
  const Clock::time_point start = Clock::now();
  std::optional<ExactSleeps> exact;
  microseconds sleep = kFirstSleep;
  for (Clock::time_point now = start;; now = Clock::now()) {
    drive();
    if (message.state.load(std::memory_order_acquire) != MpiMessage::kPending) return true;
    if (now >= deadline) return false;
    if (now - start < kWakefulness) {
      std::this_thread::yield();
      continue;
    }
    if (!exact) exact.emplace();
    ++message.num_asleep;
    wait_while(message.state, MpiMessage::kPending, std::min(deadline, now + sleep));
    --message.num_asleep;
    sleep = std::min(sleep + sleep / 4, kLongestSleep);
  }
}

void MpiEngine::leave_alone(MpiMessage& message) {
  if (message.state.load(std::memory_order_acquire) != MpiMessage::kPending) return;
  message.is_alone = true;
  ring();
}

bool MpiEngine::stop(bool orderly, Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    orderly_ = orderly;
  }
  ring();
  return wait_while(phase_, kStarting, deadline) && wait_while(phase_, kRunning, deadline);
}

void MpiEngine::begin(MpiMessage& message) {
  if (message.receives) return;
  for (std::size_t c = 0; c <= message.nbytes / chunk_nbytes_; ++c) {
    const std::size_t start = c * chunk_nbytes_;
    const auto nbytes = static_cast<int>(std::min(chunk_nbytes_, message.nbytes - start));
    const int code =
        library_->isend(message.data + start, nbytes, message.process,
                        static_cast<int>(message.tag), message.requests.emplace_back());
    if (code != 0) {
      message.requests.pop_back();
      return fail(message, library_->error_text(code));
    }
  }
}

// Whether no part of it is on its way.
bool MpiEngine::has_ended(MpiMessage& message) {
  if (message.receives && !has_come(message)) return false;
  for (; message.num_ended < message.requests.size(); ++message.num_ended) {
    bool done = false;
    const int code = library_->test(message.requests[message.num_ended], done);
    if (code != 0) {
      fail(message, library_->error_text(code));
    } else if (!done) {
      return false;
    }
  }
  message.owner.reset();
  settle(message);
  return true;
}

// Whether all its chunks have come.
bool MpiEngine::has_come(MpiMessage& message) {
  while (!message.last_has_come) {
    // What comes is for the first message that awaits this tag, though it may come just after that
    // one was looked at.
    const std::pair key(message.process, message.tag);
    if (std::ranges::find(awaited_, key) != awaited_.end()) return false;
    bool found = false;
    MpiLibrary::Arrival arrival{};
    int nbytes = 0;
    int code =
        library_->improbe(message.process, static_cast<int>(message.tag), found, arrival, nbytes);
    if (code == 0 && !found) {
      awaited_.push_back(key);
      return false;
    }
    if (code == 0) {
      const auto come = static_cast<std::size_t>(nbytes);
      const bool fits = message.num_come + come <= message.nbytes;
      std::byte* data =
          fits ? message.data + message.num_come : message.too_long.emplace_back(come).data();
      code = library_->irecv(data, nbytes, arrival, message.requests.emplace_back());
      if (code != 0) message.requests.pop_back();
      message.num_come += come;
      message.last_has_come = come < chunk_nbytes_;
    }
    if (code != 0) {
      fail(message, library_->error_text(code));
      message.last_has_come = true;
    }
  }
  if (message.num_come != message.nbytes) fail(message, fmt::format("{}", message.num_come));
  return true;
}

// It fails once no part of it is on its way, with its first error.
void MpiEngine::fail(MpiMessage& message, const std::string& got) {
  if (!message.error.empty()) return;
  message.error = fmt::format("[mpi] expected {} bytes {} process {}, got {} (process {}, tag {})",
                              message.nbytes, message.receives ? "from" : "to be sent to",
                              message.process, got, library_->process(), message.tag);
}

void MpiEngine::settle(MpiMessage& message) {
  const auto state = message.error.empty() ? MpiMessage::kDone : MpiMessage::kFailed;
  message.state = state;
  if (message.num_asleep > 0) wake_all(message.state);
}

// Owners stay: MPI may still read and write what they own. Under driver_.
void MpiEngine::give_up(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  for (Messages* messages : {&pending_, &posts_}) {
    for (const auto& message : *messages) {
      if (message == nullptr) continue;  // erase_if() has moved it
      fail(*message, "the end of what calls MPI");
      settle(*message);
    }
  }
  if (!pending_.empty()) for_good_ = shared_from_this();
  given_up_.swap(pending_);
}

void MpiEngine::enter(Phase phase) {
  phase_.store(phase, std::memory_order_release);
  wake_all(phase_);
}

void MpiEngine::ring() {
  bell_.fetch_add(1, std::memory_order_release);
  wake_all(bell_);
}

}  // namespace tessera::comm
