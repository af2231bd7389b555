#include "third_party/cuda/toolkit.h"

#include <cuda_runtime_api.h>

#include <concepts>

namespace tessera::cuda {

// Never launched: it shows that device code with templates and concepts compiles for every
// architecture asked for.
template <std::floating_point T>
__global__ void axpy(T a, const T* x, T* y, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] += a * x[i];
}

template __global__ void axpy<float>(float, const float*, float*, int);
template __global__ void axpy<double>(double, const double*, double*, int);

int toolkit_version() { return CUDART_VERSION; }

}  // namespace tessera::cuda
