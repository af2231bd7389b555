// An event of the host: whoever sets it is a thread, or a callback of a GPU. Private to engine.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/stream_impl.h"

namespace tessera::engine::internal {

class CpuEvent final : public CpuEventState {
 public:
  using Call = std::function<void(const std::exception_ptr&)>;

  /// Reached, with the error of what was to be done before it, or null.
  void set(std::exception_ptr e) {
    std::vector<Call> calls;
    {
      const std::lock_guard lock(mutex_);
      reached_ = true;
      error_ = std::move(e);
      calls.swap(calls_);
    }
    changed_.notify_all();
    for (const Call& call : calls) call(error_);
  }
  void on_reached(Call fn) override {
    {
      const std::lock_guard lock(mutex_);
      if (!reached_) return calls_.push_back(std::move(fn));
    }
    fn(error_);
  }
  bool reached() override {
    const std::lock_guard lock(mutex_);
    return reached_;
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::exception_ptr error_;  // written before `reached_`, and never again
  std::vector<Call> calls_;
};

}  // namespace tessera::engine::internal
