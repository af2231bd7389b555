#include "engine/stream.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "engine/error.h"
#include "engine/philox.h"

namespace tessera::engine {
namespace internal {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::exception_ptr error;

  void set(std::exception_ptr e) {
    {
      const std::lock_guard lock(mutex);
      reached = true;
      error = std::move(e);
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached; });
    if (error) std::rethrow_exception(error);
  }
};

class StreamImpl {
 public:
  StreamImpl(std::string name, StreamOptions options, bool is_inline)
      : name_(std::move(name)), options_(options), is_inline_(is_inline) {
    if (is_inline_) return;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      fail<DeviceError>("[stream] expected to start a thread, got {} ({})", error.what(), name_);
    }
  }

  ~StreamImpl() {
    if (is_inline_) return;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void launch(Work work, std::function<void()> fn) {
    if (is_inline_) {
      execute(work, fn);
      return;
    }
    push([this, work = std::move(work), fn = std::move(fn)] { execute(work, fn); });
  }

  Event record() {
    if (is_inline_) return Event();
    auto state = std::make_shared<EventState>();
    push_always([state](const std::exception_ptr& error) { state->set(error); });
    return Event(state);
  }

  void wait(const Event& event) {
    if (event.reached() && is_inline_) return event.wait();
    if (!is_inline_) {
      push([event] { event.wait(); });
      return;
    }
    const std::int64_t begin = now_ns();
    try {
      event.wait();
    } catch (...) {
      blocked_ns_ += now_ns() - begin;
      throw;
    }
    blocked_ns_ += now_ns() - begin;
  }

  void synchronize() {
    if (!is_inline_) record().wait();
  }

  const std::string& name() const { return name_; }
  std::int64_t blocked_ns() const { return blocked_ns_.load(std::memory_order_relaxed); }
  static EventState* state_of(const Event& event) { return event.state_.get(); }

 private:
  using Task = std::function<void(const std::exception_ptr&)>;

  void execute(const Work& work, const std::function<void()>& fn) {
    if (options_.delay_seed != 0) delay();
    if (options_.listener == nullptr) return fn();
    const std::int64_t begin = now_ns();
    fn();
    options_.listener->on_launch({work, name_, begin, now_ns()});
  }

  void delay() {
    const auto bits = philox(options_.delay_seed, delay_count_++, 0)[0];
    std::this_thread::sleep_for(std::chrono::microseconds(bits % 1000));
  }

  void push(std::function<void()> fn) {
    push_always([this, fn = std::move(fn)](const std::exception_ptr& error) {
      if (error) return;
      try {
        fn();
      } catch (...) {
        error_ = std::current_exception();
      }
    });
  }

  void push_always(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  void run() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task(error_);
    }
  }

  const std::string name_;
  const StreamOptions options_;
  const bool is_inline_;
  std::atomic<std::int64_t> blocked_ns_ = 0;
  std::uint64_t delay_count_ = 0;  // of the thread that executes

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closing_ = false;
  std::exception_ptr error_;  // worker thread only
  std::thread thread_;
};

}  // namespace internal

bool Event::reached() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->reached;
}

void Event::wait() const {
  if (state_) state_->wait();
}

Stream Stream::inline_cpu(std::string name, StreamOptions options) {
  return Stream(std::make_shared<internal::StreamImpl>(std::move(name), options, true));
}

Stream Stream::worker_cpu(std::string name, StreamOptions options) {
  return Stream(std::make_shared<internal::StreamImpl>(std::move(name), options, false));
}

void Stream::launch(Work work, std::function<void()> fn) const {
  impl_->launch(std::move(work), std::move(fn));
}
Event Stream::record(std::string_view) const { return impl_->record(); }
void Stream::wait(const Event& event) const { impl_->wait(event); }
void Stream::synchronize() const { impl_->synchronize(); }
const std::string& Stream::name() const { return impl_->name(); }
std::int64_t Stream::blocked_ns() const { return impl_->blocked_ns(); }

}  // namespace tessera::engine
