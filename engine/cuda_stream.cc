// A stream of a GPU: work is enqueued by the calling thread, and waits are the GPU's.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/cuda_host_events.h"
#include "engine/cuda_host_flags.h"
#include "engine/error.h"
#include "engine/stream_impl.h"

namespace tessera::engine::internal {
namespace {

// fn(), whose errors say `where()`.
template <class Where, class F>
auto explain(Where where, F fn) {
  try {
    return fn();
  } catch (const DeviceError& error) {
    throw DeviceError(fmt::format("{} ({})", error.what(), where()));
  }
}

// A recorded cudaEvent_t of a GPU, which must be current but for the destructor.
class Mark {
 public:
  Mark(cudaStream_t stream, unsigned flags, int gpu) : gpu_(gpu) {
    check_cuda(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
    const cudaError_t status = cudaEventRecord(event_, stream);
    if (status != cudaSuccess) (void)cudaEventDestroy(event_);
    check_cuda(status, "cudaEventRecord");
  }
  ~Mark() {
    if (event_ != nullptr) on_gpu_quietly(gpu_, [this] { (void)cudaEventDestroy(event_); });
  }
  Mark(Mark&& other) noexcept : event_(std::exchange(other.event_, nullptr)), gpu_(other.gpu_) {}
  Mark& operator=(Mark&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(gpu_, other.gpu_);
    return *this;
  }

  cudaEvent_t get() const { return event_; }
  bool reached() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check_cuda(status, "cudaEventQuery");
    return true;
  }
  std::int64_t ns_since(const Mark& earlier) const {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, earlier.event_, event_), "cudaEventElapsedTime");
    return static_cast<std::int64_t>(double{ms} * 1e6);
  }

 private:
  cudaEvent_t event_ = nullptr;
  int gpu_;
};

// A host that waits for one sleeps. Any thread may ask it, whatever its GPU; one that a GPU waits
// for asks for_host().
class CudaEvent final : public EventState {
 public:
  CudaEvent(cudaStream_t native, std::string_view name, std::shared_ptr<const std::string> stream,
            int gpu, std::shared_ptr<StreamCapture> capture, std::shared_ptr<HostEvents> host)
      : mark_(native, cudaEventDisableTiming | cudaEventBlockingSync, gpu),
        name_(name),
        stream_(std::move(stream)),
        gpu_(gpu),
        capture_(std::move(capture)),
        host_(std::move(host)) {}

  bool reached() override {
    if (capture_ != nullptr) return of_last_launch().reached();
    return on_gpu([this] { return mark_.reached(); });
  }
  void wait() override {
    if (capture_ != nullptr) return of_last_launch().wait();
    on_gpu([this] { check_cuda(cudaEventSynchronize(mark_.get()), "cudaEventSynchronize"); });
  }
  std::shared_ptr<EventState> for_host() override {
    if (capture_ != nullptr) {
      EventState* const launched = of_last_launch().state();
      return launched == nullptr ? nullptr : launched->for_host();
    }
    return on_gpu([this] { return host_->behind(mark_.get(), what()); });
  }
  cudaEvent_t get() const { return mark_.get(); }
  /// Null: not recorded in a capture.
  const std::shared_ptr<StreamCapture>& capture() const { return capture_; }
  /// What it stands for behind its capture.
  const Event& of_last_launch() const {
    require(!capture_->is_active,
            "[graph] expected nobody to wait for what is captured, got event '{}' of {}", name_,
            *stream_);
    return capture_->last_launch;
  }
  /// Throws unless a stream that captures may take it for reached: see cuda_graph.h.
  void check_before(const StreamCapture& capture) const {
    require(recorded_ns_ < capture.begin_ns,
            "[graph] expected events of the captured streams, got event '{}' of {}, which was "
            "recorded beside the capture",
            name_, *stream_);
  }

 private:
  std::string what() const { return fmt::format("event '{}' of {}", name_, *stream_); }
  template <class F>
  std::invoke_result_t<F> on_gpu(F fn) const {
    return explain([this] { return what(); },
                   [&] {
                     const CurrentGpu current(gpu_);
                     return fn();
                   });
  }

  const Mark mark_;
  const std::string name_;
  const std::shared_ptr<const std::string> stream_;
  const int gpu_;
  const std::shared_ptr<StreamCapture> capture_;
  const std::shared_ptr<HostEvents> host_;
  const std::int64_t recorded_ns_ = now_ns();
};

// Makes NVTX look for a profiler now, once: it does so lazily otherwise, in whichever threads come
// first.
void prepare_nvtx() {
  static const bool kReady = (nvtxInitialize(nullptr), true);
  static_cast<void>(kReady);
}

// "all_gather h.0 forward"
void push_nvtx(std::string_view first, std::string_view more) {
  fmt::basic_memory_buffer<char, 256> text;
  text.append(first);
  if (!more.empty()) {
    text.push_back(' ');
    text.append(more);
  }
  text.push_back('\0');
  nvtxRangePushA(text.data());
}

// Names the stretch of host time in which a launch is enqueued, for profilers. Those of a region,
// which a scope names, stand around it.
class NvtxRange {
 public:
  explicit NvtxRange(const Work& work) { push_nvtx(work.name, work.detail); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

// [Note: times of a GPU]
// Timed events stand around each wait, at each time(), and with a listener around each launch.
// Their times are read when they are past, never waited for: at a synchronisation, when
// blocked_ns() is asked, and when more than kMaxPending of them stand, so that their number is
// bounded by what the GPU has not done yet. A GPU has a clock of its own, whose differences are f32
// milliseconds. So times are counted from a base, an event whose host time is known: each
// synchronisation sets one, to the few microseconds it takes to wake up, and without any the last
// launch that was told becomes the next base, so that differences stay short. Then only the drift
// between the two clocks adds up. Where the listener has left launches out, the next one that it
// wants sets a base, and so waits once.
class CudaStream final : public StreamImpl {
 public:
  CudaStream(std::string name, int index, StreamOptions options)
      : StreamImpl(std::move(name), options, {DeviceKind::kCuda, index}) {
    prepare_nvtx();
    on_gpu({}, [&] {
      int least = 0, greatest = 0;
      check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                 "cudaDeviceGetStreamPriorityRange");
      // What is beside compute is on somebody's critical path: collectives start when they can.
      const int priority = this->name() == "compute" ? least : greatest;
      check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
                 "cudaStreamCreateWithPriority");
      if (options.listener != nullptr) set_base();
    });
  }

  ~CudaStream() override {
    // Errors were told to whoever waited.
    on_gpu_quietly(device().index, [this] {
      (void)cudaStreamSynchronize(stream_);
      if (options().listener != nullptr) settle_quietly();
      states().clear();  // handles of libraries refer to the stream
      (void)cudaStreamDestroy(stream_);
    });
  }

  void launch(Work work, std::function<void()> fn) override {
    flags_.check();
    const NvtxRange range(work);
    on_gpu(work, [&] {
      delay_stream();
      const std::optional<std::uint64_t> ticket = ticket_of(work);
      const bool has_base = std::exchange(is_told_, ticket.has_value());
      if (!ticket) return fn();
      if (!has_base) rebase();
      Mark begin = mark();
      fn();
      pending_.push_back({std::move(begin), mark(), std::move(work), {}, *ticket});
      if (pending_.size() > kMaxPending) settle();
    });
  }

  void push_scope(Scope scope) override {
    StreamImpl::push_scope(scope);
    push_nvtx(scope.block, scope.phase);
  }
  void pop_scope() override {
    nvtxRangePop();
    StreamImpl::pop_scope();
  }

  Event record(std::string_view event_name) override {
    flags_.check();
    return on_gpu({}, [&] {
      return Event(std::make_shared<CudaEvent>(stream_, event_name, where_, device().index,
                                               capture_, host_events_));
    });
  }

  void wait(const Event& event) override {
    flags_.check();
    if (event.state() == nullptr) return;
    if (auto* cpu_event = dynamic_cast<CpuEventState*>(event.state())) return wait(*cpu_event);
    auto* cuda_event = dynamic_cast<CudaEvent*>(event.state());
    if (capture_ != nullptr) return wait_in_capture(event, *cuda_event);
    if (cuda_event->capture() != nullptr) return wait(cuda_event->of_last_launch());
    on_gpu({}, [&] {
      Mark begin = mark();
      check_cuda(cudaStreamWaitEvent(stream_, cuda_event->get(), 0), "cudaStreamWaitEvent");
      pending_.push_back({std::move(begin), mark(), {}, {}, 0});
      settle();
    });
  }

  void synchronize() override {
    require(capture_ == nullptr, "[graph] expected nobody to wait for {} while it captures",
            *where_);
    on_gpu({}, [&] { rebase(); });
    flags_.check();
  }

  std::int64_t blocked_ns() override {
    if (capture_ == nullptr) settle();
    return blocked_ns_;
  }
  std::shared_ptr<const StreamTime> time() override {
    auto time = std::make_shared<StreamTime>();
    if (capture_ == nullptr) {
      on_gpu({}, [&] {
        pending_.push_back({{}, mark(), {}, {}, 0, time});
        settle();
      });
    }
    return time;
  }
  void* native() const override { return stream_; }
  void set_capture(std::shared_ptr<StreamCapture> capture) override {
    require(capture == nullptr || options().listener == nullptr,
            "[graph] expected streams that nobody listens to, got {}: a graph has no times of its "
            "launches",
            *where_);
    capture_ = std::move(capture);
  }
  bool is_capturing() const override { return capture_ != nullptr; }

 private:
  struct Pending {
    std::optional<Mark> begin;
    Mark end;
    Work work;                       // no name: a wait, or a time
    std::shared_ptr<HostFlag> flag;  // that is waited for
    std::uint64_t ticket;
    std::shared_ptr<StreamTime> time = {};  // to be told of `end`, which then has no begin
  };
  struct Base {
    Mark mark;
    std::int64_t ns;  // of the host, when the mark was reached
  };
  static constexpr std::size_t kMaxPending = 256;

  // Now. This GPU must be current.
  Mark mark() const { return {stream_, cudaEventDefault, device().index}; }

  // fn() with this GPU current. Its errors name the work, if it is some, the stream and the GPU.
  template <class F>
  std::invoke_result_t<F> on_gpu(const Work& work, F fn) {
    const auto where = [&] {
      if (work.name.empty()) return *where_;
      return fmt::format("{}{}{}, {}", work.name, work.detail.empty() ? "" : " of ", work.detail,
                         *where_);
    };
    return explain(where, [&] {
      const CurrentGpu current(device().index);
      return fn();
    });
  }

  // Without times, which would be asked for.
  void wait_in_capture(const Event& handle, const CudaEvent& event) {
    if (event.capture() != capture_) {
      event.check_before(*capture_);
      capture_->before.push_back(handle);
      return;
    }
    on_gpu({}, [&] {
      check_cuda(cudaStreamWaitEvent(stream_, event.get(), 0), "cudaStreamWaitEvent");
    });
  }

  // See cuda_host_flags.h.
  void wait(CpuEventState& event) {
    require(capture_ == nullptr,
            "[graph] expected work of the GPU alone, got {} to wait for the host", *where_);
    if (event.reached()) return event.wait();
    on_gpu({}, [&] {
      settle();
      Mark begin = mark();
      std::shared_ptr<HostFlag> flag = flags_.wait_for(event, stream_, device().index);
      pending_.push_back({std::move(begin), mark(), {}, std::move(flag), 0});
    });
  }

  // Blocks until everything is done. A thread that was held up reads the clock late, so whoever
  // listens gets the best of some attempts.
  void set_base() {
    constexpr int kMaxAttempts = 8;
    constexpr std::int64_t kGoodNs = 50'000;
    const int attempts = options().listener != nullptr ? kMaxAttempts : 1;
    std::int64_t best_ns = std::numeric_limits<std::int64_t>::max();
    for (int i = 0; i < attempts && best_ns > kGoodNs; ++i) {
      const std::int64_t begin = now_ns();
      Mark base = mark();
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      const std::int64_t end = now_ns();
      if (end - begin >= best_ns) continue;
      best_ns = end - begin;
      base_ = {std::move(base), end};
    }
  }

  void rebase() {
    set_base();
    settle(/*is_before_base=*/true);
  }

  // For a stream that goes.
  void settle_quietly() noexcept {
    try {
      settle();
    } catch (...) {  // what the GPU failed with was told
    }
  }

  // Accounts for what is past, all of it before the base or all behind it.
  void settle(bool is_before_base = false) {
    std::optional<Base> last;
    while (!pending_.empty() && pending_.front().end.reached()) {
      Pending& p = pending_.front();
      if (p.time != nullptr) {
        tell(p);
        pending_.pop_front();
        continue;
      }
      const std::int64_t elapsed = p.end.ns_since(*p.begin);
      if (p.work.name.empty()) {
        blocked_ns_ += elapsed;
      } else {
        const std::int64_t end = is_before_base ? base_->ns - base_->mark.ns_since(p.end)
                                                : base_->ns + p.end.ns_since(base_->mark);
        // A thread that was held up reads the host's clock late. Still no launch of a stream begins
        // before another has ended.
        const std::int64_t begin = std::max(end - elapsed, last_end_ns_);
        last_end_ns_ = begin + elapsed;
        options().listener->on_launch({p.work, name(), begin, last_end_ns_, p.ticket});
        last = Base{std::move(p.end), end};
      }
      pending_.pop_front();
    }
    if (last && !is_before_base) base_ = std::move(last);
  }

  // From time to time, so that differences, which are f32, stay short.
  void tell(Pending& p) {
    if (last_time_) time_ns_ += p.end.ns_since(*last_time_);
    last_time_ = std::move(p.end);
    *p.time = {time_ns_, blocked_ns_, true};
  }

  void delay_stream() {
    if (options().delay_seed == 0) return;
    check_cuda(cudaLaunchHostFunc(
                   stream_, [](void* self) { static_cast<CudaStream*>(self)->delay(); }, this),
               "cudaLaunchHostFunc");
  }

  const std::shared_ptr<const std::string> where_ = std::make_shared<const std::string>(
      fmt::format("stream '{}' of {}", name(), to_string(device())));
  cudaStream_t stream_ = nullptr;
  std::deque<Pending> pending_;
  std::optional<Base> base_;  // with a listener, or after a synchronisation
  std::int64_t blocked_ns_ = 0;
  std::optional<Mark> last_time_;  // that was told
  std::int64_t time_ns_ = 0;       // then
  std::int64_t last_end_ns_ = 0;   // told to the listener
  bool is_told_ = true;            // the listener wanted the last launch
  HostFlags flags_;
  const std::shared_ptr<HostEvents> host_events_ = std::make_shared<HostEvents>(device().index);
  std::shared_ptr<StreamCapture> capture_;  // null: work is done
};

}  // namespace

std::shared_ptr<StreamImpl> make_cuda(std::string name, int index, StreamOptions options) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  require<DeviceError>(
      status == cudaSuccess && index >= 0 && index < count,
      "[cuda] expected GPU {} for stream '{}', got {}", index, name,
      status == cudaSuccess ? fmt::format("{} usable GPUs", count) : cudaGetErrorString(status));
  return std::make_shared<CudaStream>(std::move(name), index, options);
}

}  // namespace tessera::engine::internal
