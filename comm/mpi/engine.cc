#include "comm/mpi/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using std::chrono::microseconds;

// While messages are on their way the thread looks this often, and then sleeps, each time longer.
constexpr int kNumPolls = 20;
constexpr microseconds kFirstSleep{10}, kLongestSleep{200};
// MPI may have work left for messages that are done on this side, such as the rest of a short one
// that a full socket did not take. So the thread looks from time to time when it has no messages.
constexpr microseconds kLongestIdleSleep{100'000};

}  // namespace

void MpiEngine::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: sleeps of 10 us would take 60
  try {
    library_->start();
    enter(kRunning);
    serve();
  } catch (...) {
    give_up(std::current_exception());
  }
  enter(kEnded);
}

void MpiEngine::serve() {
  int num_polls = 0;
  microseconds sleep = kFirstSleep;
  while (true) {
    const std::uint32_t bell = bell_.load(std::memory_order_acquire);
    bool stopped = false, orderly = false;
    Messages posts;
    {
      const std::lock_guard lock(mutex_);
      posts.swap(posts_);
      stopped = stopped_;
      orderly = orderly_;
    }
    pending_.insert(pending_.end(), posts.begin(), posts.end());
    for (const auto& message : posts) begin(*message);
    awaited_.clear();
    const std::size_t num_ended =
        std::erase_if(pending_, [this](const auto& message) { return has_ended(*message); });
    if (stopped) {
      if (!pending_.empty()) {
        for_good_ = shared_from_this();
      } else if (orderly) {
        library_->finish();
      }
      return;
    }
    if (!posts.empty() || num_ended > 0) {
      num_polls = 0;
      sleep = kFirstSleep;
      continue;
    }
    if (pending_.empty()) library_->progress();
    if (++num_polls <= kNumPolls) continue;
    wait_while(bell_, bell, Clock::now() + sleep);
    // Slowly: two processes that wait for each other in turn would make each other's sleeps longer.
    sleep = std::min(sleep + sleep / 4, pending_.empty() ? kLongestIdleSleep : kLongestSleep);
  }
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
  bell_.fetch_add(1, std::memory_order_release);
  wake_all(bell_);
}

bool MpiEngine::stop(bool orderly, Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    orderly_ = orderly;
  }
  bell_.fetch_add(1, std::memory_order_release);
  wake_all(bell_);
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
    if (awaited_.contains({message.process, message.tag})) return false;
    bool found = false;
    MpiLibrary::Arrival arrival{};
    int nbytes = 0;
    int code =
        library_->improbe(message.process, static_cast<int>(message.tag), found, arrival, nbytes);
    if (code == 0 && !found) {
      awaited_.insert({message.process, message.tag});
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
  message.state.store(state, std::memory_order_release);
  wake_all(message.state);
}

// Owners stay: MPI may still read and write what they own.
void MpiEngine::give_up(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  for (Messages* messages : {&pending_, &posts_}) {
    for (const auto& message : *messages) {
      if (message == nullptr) continue;  // erase_if() has moved it
      fail(*message, "the end of the thread that owns MPI");
      settle(*message);
    }
  }
  if (!pending_.empty()) for_good_ = shared_from_this();
}

void MpiEngine::enter(Phase phase) {
  phase_.store(phase, std::memory_order_release);
  wake_all(phase_);
}

}  // namespace tessera::comm
