// Scratch of kernels of the CPU, which is asked for before the launch, so that what a launch needs
// is known without running it. Private to ops.
#pragma once

#include <string_view>

#include "engine/tape.h"

namespace tessera::ops {

/// Undefined on a GPU, whose kernels have their own.
inline engine::Tensor host_workspace(const engine::Tape& tape, const engine::Shape& shape,
                                     std::string_view name,
                                     engine::DType dtype = engine::DType::kF32) {
  if (tape.stream().device().is_cuda()) return {};
  return engine::Tensor::empty(tape.memory(), shape, dtype, name, engine::Category::kWorkspace);
}

}  // namespace tessera::ops
