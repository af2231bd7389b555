#include "tools/train/pending_gather.h"

#include <utility>

#include "engine/copy.h"

namespace tessera::tools {

using engine::Category;
using engine::DType;
using engine::Tensor;

PendingGather::PendingGather(comm::ProcessGroup& world, Tensor values,
                             const engine::Stream& metrics, const engine::Memory& pinned)
    : world_(&world), values_(std::move(values)) {
  const engine::Memory& memory = values_.buffer()->memory();
  const auto empty = [&](const engine::Memory& where) {
    return Tensor::empty(where, {values_.numel() * world.size()}, DType::kF32,
                         "values of all ranks", Category::kCommunication);
  };
  all_ = empty(memory);
  host_ = empty(pinned);
  metrics.wait(memory.allocated());
  try {
    world.all_gather(values_, all_, metrics, "values");
    engine::copy(host_, all_, metrics, "copy_values");
    ready_ = metrics.record("values on the host");
  } catch (...) {
    // What was enqueued uses tensors that die here; without the peers it might never end.
    world.abort("a rank could not gather its values");
    metrics.synchronize_quietly();
    throw;
  }
}

std::vector<float> PendingGather::wait(const engine::Stream& compute) const {
  if (compute.device().is_cuda()) {
    ready_.wait();
    world_->check();
  } else {
    compute.wait(ready_);
  }
  const auto values = host_.span<float>();
  return {values.begin(), values.end()};
}

}  // namespace tessera::tools
