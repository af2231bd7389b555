// A stream of a GPU: work is enqueued by the calling thread, and waits are the GPU's.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/cuda_host_events.h"
#include "engine/cuda_host_flags.h"
#include "engine/cuda_marks.h"
#include "engine/cuda_times.h"
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

// A host that waits for one sleeps. Any thread may ask it, whatever its GPU; one that a GPU waits
// for asks for_host(). It may outlive the stream, and go in any thread: it has an event of its own.
class CudaEvent final : public EventState {
 public:
  CudaEvent(cudaStream_t native, std::string_view name, std::shared_ptr<const std::string> stream,
            int gpu, std::shared_ptr<StreamCapture> capture, std::shared_ptr<HostEvents> host)
      : name_(name),
        stream_(std::move(stream)),
        gpu_(gpu),
        capture_(std::move(capture)),
        host_(std::move(host)) {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
               "cudaEventCreateWithFlags");
    const cudaError_t status = cudaEventRecord(event_, native);
    if (status != cudaSuccess) (void)cudaEventDestroy(event_);
    check_cuda(status, "cudaEventRecord");
  }
  ~CudaEvent() override {
    on_gpu_quietly(gpu_, [this] { (void)cudaEventDestroy(event_); });
  }

  bool reached() override {
    if (capture_ != nullptr) return of_last_launch().reached();
    return on_gpu([this] { return is_reached(event_); });
  }
  void wait() override {
    if (capture_ != nullptr) return of_last_launch().wait();
    on_gpu([this] { check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize"); });
  }
  std::shared_ptr<EventState> for_host() override {
    if (capture_ != nullptr) {
      EventState* const launched = of_last_launch().state();
      return launched == nullptr ? nullptr : launched->for_host();
    }
    return on_gpu([this] { return host_->behind(event_, what()); });
  }
  cudaEvent_t get() const { return event_; }
  /// Null: not recorded in a capture.
  const std::shared_ptr<StreamCapture>& capture() const { return capture_; }
  /// What it stands for after its capture.
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
            "recorded outside the capture",
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

  cudaEvent_t event_ = nullptr;
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

class CudaStream final : public StreamImpl {
 public:
  CudaStream(std::string name, int index, StreamOptions options)
      : StreamImpl(std::move(name), options, {DeviceKind::kCuda, index}) {
    if (options.listener != nullptr) on_gpu({}, [&] { times_.rebase(); });
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
      if (!ticket) {
        times_.forget();
        return fn();
      }
      if (!has_base) times_.rebase();
      CudaMark begin = times_.begin();
      fn();
      times_.end_launch(std::move(begin), std::move(work), *ticket);
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
      CudaMark begin = times_.begin();
      check_cuda(cudaStreamWaitEvent(stream_, cuda_event->get(), 0), "cudaStreamWaitEvent");
      times_.end_wait(std::move(begin));
    });
  }

  void synchronize() override {
    require(capture_ == nullptr, "[graph] expected nobody to wait for {} while it captures",
            *where_);
    on_gpu({}, [&] { times_.rebase(); });
    flags_.check();
  }

  std::int64_t blocked_ns() override {
    if (capture_ == nullptr) on_gpu({}, [&] { times_.settle(); });
    return times_.blocked_ns();
  }
  std::shared_ptr<const StreamTime> time() override {
    auto time = std::make_shared<StreamTime>();
    if (capture_ == nullptr) on_gpu({}, [&] { times_.end_time(time); });
    return time;
  }
  void* native() const override {
    times_.forget();  // whoever asks may enqueue
    return stream_;
  }
  void set_capture(std::shared_ptr<StreamCapture> capture) override {
    require(capture == nullptr || options().listener == nullptr,
            "[graph] expected streams that nobody listens to, got {}: a graph has no times of its "
            "launches",
            *where_);
    capture_ = std::move(capture);
  }
  bool is_capturing() const override { return capture_ != nullptr; }

 private:
  cudaStream_t make_stream() {
    prepare_nvtx();
    return on_gpu({}, [&] {
      int least = 0, greatest = 0;
      check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                 "cudaDeviceGetStreamPriorityRange");
      // What runs while compute does is on somebody's critical path: collectives start when they
      // can.
      const int priority = name() == "compute" ? least : greatest;
      cudaStream_t stream = nullptr;
      check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
                 "cudaStreamCreateWithPriority");
      return stream;
    });
  }

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
      times_.settle();  // gives flags back
      CudaMark begin = times_.begin();
      std::shared_ptr<HostFlag> flag = flags_.wait_for(event, stream_, device().index);
      times_.end_wait(std::move(begin), std::move(flag));
    });
  }

  // For a stream that goes.
  void settle_quietly() noexcept {
    try {
      times_.settle();
    } catch (...) {  // what the GPU failed with was told
    }
  }

  void delay_stream() {
    if (options().delay_seed == 0) return;
    times_.forget();
    check_cuda(cudaLaunchHostFunc(
                   stream_, [](void* self) { static_cast<CudaStream*>(self)->delay(); }, this),
               "cudaLaunchHostFunc");
  }

  const std::shared_ptr<const std::string> where_ = std::make_shared<const std::string>(
      fmt::format("stream '{}' of {}", name(), to_string(device())));
  const cudaStream_t stream_ = make_stream();
  mutable CudaTimes times_{stream_, device().index, name(), options().listener};
  bool is_told_ = true;  // the listener wanted the last launch
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
