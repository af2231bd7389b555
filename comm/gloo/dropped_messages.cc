#include "comm/gloo/dropped_messages.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

namespace tessera::comm {

using std::chrono::milliseconds;

void DroppedMessages::take(PostedMessage message) {
  if (functions_.try_drop(message.message)) return;
  const std::lock_guard lock(mutex_);
  messages_.push_back(std::move(message));
  if (closed_) return;  // close() frees it, or the destructor
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  } catch (const std::exception&) {  // no thread or no memory left
    // A destructor drops it, and can tell nobody. The next one tries again, else close() frees it.
  }
  changed_.notify_one();
}

void DroppedMessages::watch() {
  constexpr milliseconds kShortest{1}, kLongest{100};
  milliseconds pause = kShortest;
  std::size_t num_known = 0;
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (messages_.empty()) changed_.wait(lock, [&] { return closed_ || !messages_.empty(); });
    const auto done = std::partition(messages_.begin(), messages_.end(), [&](PostedMessage& m) {
      return !functions_.try_drop(m.message);
    });
    // An owner may do anything, so it goes without the lock.
    std::vector<PostedMessage> freed(std::make_move_iterator(done),
                                     std::make_move_iterator(messages_.end()));
    messages_.erase(done, messages_.end());
    pause =
        freed.empty() && messages_.size() <= num_known ? std::min(2 * pause, kLongest) : kShortest;
    num_known = messages_.size();
    lock.unlock();
    freed.clear();
    lock.lock();
    if (!messages_.empty()) {
      changed_.wait_for(lock, pause, [&] { return closed_ || messages_.size() > num_known; });
    }
  }
}

void DroppedMessages::close() {
  std::vector<PostedMessage> left;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left = std::move(messages_);
    messages_.clear();
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  for (PostedMessage& message : left) functions_.try_drop(message.message);
}

}  // namespace tessera::comm
