// For pointwise ops of one's own that a C++ compiler alone builds, against a library that was built
// with CUDA: what launches them includes this in place of a .cu file (see ops/pointwise.h), or is
// compiled with -include ops/pointwise_without_nvcc.h. They compute on CPUs, and throw DeviceError
// on a GPU. The library's own ops have their kernels as before. A program has either this or the
// .cu file, not both.
#pragma once

#include "engine/error.h"
#include "ops/pointwise.h"

namespace tessera::ops {

template <class F>
void pointwise_cuda(const engine::Stream& stream, const Pointwise<F>& p) {
  engine::fail<engine::DeviceError>(
      "[pointwise] expected a kernel that nvcc compiled, got an op that was built without, for "
      "CPUs: ops/pointwise.h says what a .cu file is to instantiate ({}, {})",
      p.out.dst.name(), to_string(stream.device()));
}

}  // namespace tessera::ops
