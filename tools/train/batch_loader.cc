#include "tools/train/batch_loader.h"

#include <chrono>
#include <system_error>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"

namespace tessera::tools {

using engine::Memory;
using engine::Tensor;

Batch empty_batch(const Memory& memory, const std::vector<BatchTensor>& tensors) {
  Batch batch;
  for (const BatchTensor& t : tensors) {
    batch.push_back(Tensor::empty(memory, t.shape, t.dtype, t.name));
  }
  return batch;
}

Batch load_batch(const Memory& memory, const std::vector<BatchTensor>& tensors,
                 const std::function<void(const Batch& host)>& fill) {
  const bool on_gpu = memory.device().is_cuda();
  Batch host = empty_batch(on_gpu ? Memory() : memory, tensors);
  fill(host);
  if (!on_gpu) return host;
  Batch device = empty_batch(memory, tensors);
  for (std::size_t i = 0; i < host.size(); ++i) {
    device[i].copy_from_host(host[i].raw(), host[i].numel());
  }
  return device;
}

// [Note: staging]
// Two slots, used in turn. On the CPU a batch is read where it was filled, and its slot is free
// when the next one is asked for: all work on it has been done by then. On a GPU a slot is a pinned
// buffer and a tensor of the device, and a batch passes through both:
//
//   loader thread   fill host [n]                  (after copied [n-2])
//   copy stream     host -> device                 (after used [n-2])
//   compute         work on device [n]             (after copied [n]); used [n] at the next call
//
// The host is ahead of the GPU, so a batch is copied while the GPU works on the one before. The
// loader thread asks for `copied` now and then instead of waiting for it, so that it can be stopped
// even if the GPU never gets there.

BatchLoader::BatchLoader(const Memory& memory, const engine::Stream& compute,
                         const std::vector<BatchTensor>& tensors, std::int64_t num_batches,
                         Fill fill, engine::LaunchListener* listener)
    : compute_(compute),
      copy_(compute.device().is_cuda() ? compute.sibling("loader", {.listener = listener})
                                       : compute),
      tensors_(tensors),
      num_batches_(num_batches),
      fill_(std::move(fill)) {
  const Memory host = on_gpu() ? Memory::pinned(compute) : memory;
  for (Slot& slot : slots_) {
    slot.host = empty_batch(host, tensors);
    if (on_gpu()) slot.device = empty_batch(memory, tensors);
    slot.used = memory.allocated();
  }
  if (compute.device().is_meta) {
    num_filled_ = num_batches;
    return;
  }
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { fill_all(stop); });
  } catch (const std::system_error& error) {
    engine::fail<engine::DeviceError>("[batch_loader] expected to start a thread, got {}",
                                      error.what());
  }
}

BatchLoader::~BatchLoader() {
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
  }
  copy_.synchronize_quietly();  // copies read slots, which die before the stream does
}

void BatchLoader::fill_all(const std::stop_token& stop) {
  try {
    for (std::int64_t n = 0; n < num_batches_; ++n) {
      Slot& slot = slot_of(n);
      engine::Event copied;
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [&] { return n < num_released_ + kNumSlots; })) return;
        copied = slot.copied;
      }
      while (!copied.reached()) {
        if (stop.stop_requested()) return;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      fill_(n, slot.host);
      const std::lock_guard lock(mutex_);
      num_filled_ = n + 1;
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

const Batch& BatchLoader::next() {
  engine::require(num_taken_ < num_batches_, "[batch_loader] expected at most {} batches, got more",
                  num_batches_);
  const std::int64_t n = num_taken_;
  Slot& slot = slot_of(n);
  {
    std::unique_lock lock(mutex_);
    if (!on_gpu()) num_released_ = n;
    changed_.notify_all();
    changed_.wait(lock, [&] { return num_filled_ > n || error_; });
    if (num_filled_ <= n) std::rethrow_exception(error_);
  }
  if (on_gpu()) upload(slot);
  ++num_taken_;
  return on_gpu() ? slot.device : slot.host;
}

const Batch& BatchLoader::again(std::int64_t n) {
  engine::require(0 <= n && n < num_taken_,
                  "[batch_loader] expected one of the {} batches that were read, got {}",
                  num_taken_, n);
  Slot& slot = slot_of(num_taken_ - 1);
  const Batch& batch = on_gpu() ? slot.device : slot.host;
  if (compute_.device().is_meta) return batch;
  if (!on_gpu()) {  // the slot is this thread's until next()
    fill_(n, slot.host);
    return batch;
  }
  // The pinned one may be the loader thread's by now.
  const Batch host = empty_batch(Memory(), tensors_);
  fill_(n, host);
  for (std::size_t i = 0; i < host.size(); ++i) {
    batch[i].copy_from_host(host[i].raw(), host[i].numel());  // after what compute has been given
  }
  return batch;
}

void BatchLoader::upload(Slot& slot) {
  if (num_taken_ > 0) slot_of(num_taken_ - 1).used = compute_.record("batch used");
  copy_.wait(slot.used);
  for (std::size_t i = 0; i < slot.host.size(); ++i) {
    engine::copy(slot.device[i], slot.host[i], copy_, "copy_batch");
  }
  const engine::Event copied = copy_.record("batch copied");
  compute_.wait(copied);
  const std::lock_guard lock(mutex_);
  slot.copied = copied;
  num_released_ = num_taken_ + 1;
  changed_.notify_all();
}

}  // namespace tessera::tools
