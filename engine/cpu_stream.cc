// Streams of the CPU: one that runs in the calling thread, and one with a thread of its own.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cpu_event.h"
#include "engine/error.h"
#include "engine/philox.h"
#include "engine/stream_impl.h"

namespace tessera::engine::internal {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void StreamImpl::delay() {
  if (options_.delay_seed == 0) return;
  const auto bits = philox(options_.delay_seed, delay_count_++, 0)[0];
  std::this_thread::sleep_for(std::chrono::microseconds(bits % 1000));
}

namespace {

class CpuStream : public StreamImpl {
 public:
  CpuStream(std::string name, StreamOptions options)
      : StreamImpl(std::move(name), options, Device{}) {}

 protected:
  void execute(const Work& work, std::optional<std::uint64_t> ticket,
               const std::function<void()>& fn) {
    delay();
    if (!ticket) return fn();
    const std::int64_t begin = now_ns();
    fn();
    options().listener->on_launch({work, name(), begin, now_ns(), *ticket});
  }
};

class InlineCpuStream final : public CpuStream {
 public:
  using CpuStream::CpuStream;

  void launch(Work work, std::function<void()> fn) override { execute(work, ticket_of(work), fn); }
  Event record(std::string_view) override { return Event(); }
  void synchronize() override {}
  std::int64_t blocked_ns() override { return blocked_ns_.load(std::memory_order_relaxed); }
  std::shared_ptr<const StreamTime> time() override {
    return std::make_shared<StreamTime>(StreamTime{now_ns(), blocked_ns(), true});
  }

  void wait(const Event& event) override {
    if (event.reached()) return event.wait();
    const std::int64_t begin = now_ns();
    try {
      event.wait();
    } catch (...) {
      blocked_ns_ += now_ns() - begin;
      throw;
    }
    blocked_ns_ += now_ns() - begin;
  }

 private:
  std::atomic<std::int64_t> blocked_ns_ = 0;
};

class WorkerCpuStream final : public CpuStream {
 public:
  WorkerCpuStream(std::string name, StreamOptions options) : CpuStream(std::move(name), options) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      fail<DeviceError>("[stream] expected to start a thread, got {} ({})", error.what(),
                        this->name());
    }
  }

  ~WorkerCpuStream() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void launch(Work work, std::function<void()> fn) override {
    const std::optional<std::uint64_t> ticket = ticket_of(work);
    push([this, work = std::move(work), ticket, fn = std::move(fn)] { execute(work, ticket, fn); });
  }

  Event record(std::string_view) override {
    auto state = std::make_shared<CpuEvent>();
    push_always([state](const std::exception_ptr& error) { state->set(error); });
    return Event(state);
  }

  void wait(const Event& event) override {
    push([event = event.for_host()] { event.wait(); });
  }
  // Allocates nothing, so that memory which tasks use can be freed after it in any case.
  void synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, last = num_pushed_] { return num_done_ >= last; });
    if (error_) std::rethrow_exception(error_);
  }
  std::int64_t blocked_ns() override { return 0; }

 private:
  using Task = std::function<void(const std::exception_ptr&)>;

  void push(std::function<void()> fn) {
    push_always([this, fn = std::move(fn)](const std::exception_ptr& error) {
      if (error) return;
      try {
        fn();
      } catch (...) {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
      }
    });
  }

  void push_always(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      ++num_pushed_;
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
      task = nullptr;  // what it holds on to goes before the task counts as done
      {
        const std::lock_guard lock(mutex_);
        ++num_done_;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closing_ = false;
  std::int64_t num_pushed_ = 0, num_done_ = 0;
  std::exception_ptr error_;  // written by the worker thread, under the mutex
  std::thread thread_;
};

}  // namespace

std::shared_ptr<StreamImpl> make_inline_cpu(std::string name, StreamOptions options) {
  return std::make_shared<InlineCpuStream>(std::move(name), options);
}

std::shared_ptr<StreamImpl> make_worker_cpu(std::string name, StreamOptions options) {
  return std::make_shared<WorkerCpuStream>(std::move(name), options);
}

}  // namespace tessera::engine::internal
