#include "engine/cuda_host_flags.h"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "engine/cuda.h"
#include "engine/cuda_check.h"
#include "engine/error.h"

namespace tessera::engine::internal {

/// The first error of what was waited for.
class HostFailure {
 public:
  void set(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    has_error_ = true;
  }
  void check() {
    if (!has_error_) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> has_error_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
};

namespace {

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

WaitValue wait_value() {
  static const auto kFound =
      reinterpret_cast<WaitValue>(find_driver_function("cuStreamWaitValue32"));
  return kFound;
}

}  // namespace

HostFlags::HostFlags() : failure_(std::make_shared<HostFailure>()) {}

void HostFlags::check() const { failure_->check(); }

// One that nobody waits for any more, nor will write.
std::shared_ptr<HostFlag> HostFlags::take(int device) {
  for (const std::shared_ptr<HostFlag>& flag : flags_) {
    if (flag.use_count() > 1) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    ++flag->number;
    return flag;
  }
  constexpr std::size_t kNumMore = 1024;
  const Device pinned{DeviceKind::kPinned, device};
  std::byte* const memory = cuda::allocate(pinned, kNumMore * sizeof(std::uint32_t));
  require<DeviceError>(memory != nullptr,
                       "[cuda] expected {} bytes of page-locked memory, got none",
                       kNumMore * sizeof(std::uint32_t));
  const std::shared_ptr<std::uint32_t> words(
      reinterpret_cast<std::uint32_t*>(memory),
      [pinned](std::uint32_t* w) { cuda::deallocate(pinned, reinterpret_cast<std::byte*>(w)); });
  std::fill_n(words.get(), kNumMore, 0u);
  flags_.reserve(flags_.size() + kNumMore);
  for (std::size_t i = 0; i < kNumMore; ++i) {
    flags_.push_back(std::make_shared<HostFlag>(
        HostFlag{std::shared_ptr<std::uint32_t>(words, words.get() + i)}));
  }
  ++flags_.back()->number;
  return flags_.back();
}

std::shared_ptr<HostFlag> HostFlags::wait_for(CpuEventState& event, cudaStream_t stream,
                                              int device) {
  std::shared_ptr<HostFlag> flag = take(device);
  const CUresult status = wait_value()(stream, reinterpret_cast<CUdeviceptr>(flag->word.get()),
                                       flag->number, CU_STREAM_WAIT_VALUE_GEQ);
  require<DeviceError>(status == CUDA_SUCCESS,
                       "[cuda] expected cuStreamWaitValue32 to succeed, got error {}",
                       static_cast<int>(status));
  event.on_reached(
      [flag, number = flag->number, failure = failure_](const std::exception_ptr& error) {
        if (error) failure->set(error);
        std::atomic_ref(*flag->word).store(number, std::memory_order_release);
      });
  return flag;
}

}  // namespace tessera::engine::internal
