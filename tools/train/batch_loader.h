// Batches staged ahead of use: a thread fills the next one while a step runs.
//
//   BatchLoader loader(memory, compute, {{"tokens", {8, 256}, DType::kI32}, ...}, num_batches,
//                      [&](std::int64_t n, const Batch& host) { ... host[0].span<int>() ... });
//   const Batch& batch = loader.next();    // on the device of `compute`
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::tools {

using Batch = std::vector<engine::Tensor>;

struct BatchTensor {
  std::string name;
  engine::Shape shape;
  engine::DType dtype;
};

/// One batch of `memory`, not filled.
Batch empty_batch(const engine::Memory& memory, const std::vector<BatchTensor>& tensors);

/// One batch of `memory`, filled on the host and, on a GPU, copied there.
Batch load_batch(const engine::Memory& memory, const std::vector<BatchTensor>& tensors,
                 const std::function<void(const Batch& host)>& fill);

class BatchLoader {
 public:
  /// Writes every element of batch `n` to `host`, in the loader's thread.
  using Fill = std::function<void(std::int64_t n, const Batch& host)>;

  /// Fills batches 0 to num_batches - 1 in order. `memory`: of compute's device. `listener`: told
  /// of copies to the GPU. Destroyed only when `compute` is certain to come to an end, as it waits
  /// for copies after that. Throws DeviceError if no thread can be started.
  BatchLoader(const engine::Memory& memory, const engine::Stream& compute,
              const std::vector<BatchTensor>& tensors, std::int64_t num_batches, Fill fill,
              engine::LaunchListener* listener = nullptr);
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// The next batch, for work launched on `compute` before the next call. Rethrows what `fill`
  /// threw at this batch. Throws InvalidArgument after the last one.
  const Batch& next();
  /// Batch `n`, which next() has returned before, once more: filled in this thread, while the
  /// loader's may fill others, in place of the one that was returned last. For work launched on
  /// `compute` before the next call of either. Blocks. Throws what `fill` does, and InvalidArgument
  /// for a batch that next() has not come to.
  const Batch& again(std::int64_t n);

 private:
  static constexpr std::int64_t kNumSlots = 2;
  // See [Note: staging] in batch_loader.cc.
  struct Slot {
    Batch host, device;
    engine::Event copied;  // host may be written again
    engine::Event used;    // device may be written again
  };
  void fill_all(const std::stop_token& stop);
  void upload(Slot& slot);
  bool on_gpu() const { return compute_.device().is_cuda(); }
  Slot& slot_of(std::int64_t n) { return slots_[static_cast<std::size_t>(n % kNumSlots)]; }

  const engine::Stream compute_;
  const engine::Stream copy_;
  const std::vector<BatchTensor> tensors_;
  const std::int64_t num_batches_;
  const Fill fill_;
  std::array<Slot, kNumSlots> slots_;
  std::int64_t num_taken_ = 0;  // of the thread that calls next()

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::int64_t num_filled_ = 0;    // batches in their slots
  std::int64_t num_released_ = 0;  // batches whose slot may be filled again, from `copied` on
  std::exception_ptr error_;       // of filling batch num_filled_
  std::jthread thread_;
};

}  // namespace tessera::tools
