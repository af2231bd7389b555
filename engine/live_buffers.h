// The buffers of a memory that live, for what has to look at all of them. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera::engine {

class Buffer;

class LiveBuffers {
 public:
  void add(std::weak_ptr<Buffer> buffer) {
    const std::lock_guard lock(mutex_);
    if (buffers_.size() == buffers_.capacity()) {
      std::erase_if(buffers_, [](const auto& b) { return b.expired(); });
      buffers_.reserve(2 * buffers_.size() + 1);
    }
    buffers_.push_back(std::move(buffer));
  }

  std::vector<std::shared_ptr<Buffer>> all() const {
    std::vector<std::shared_ptr<Buffer>> alive;
    const std::lock_guard lock(mutex_);
    alive.reserve(buffers_.size());
    for (const std::weak_ptr<Buffer>& buffer : buffers_) {
      if (auto held = buffer.lock()) alive.push_back(std::move(held));
    }
    return alive;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Buffer>> buffers_;
};

}  // namespace tessera::engine
