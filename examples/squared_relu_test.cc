// The op against its slope by differences, in bf16, and on GPU 0 where there is one.
#include "squared_relu.h"

#include <cstdio>
#include <exception>
#include <vector>

#include "engine/cuda.h"
#include "engine/gradcheck.h"

namespace engine = tessera::engine;
namespace gradcheck = tessera::engine::gradcheck;

int main() {
  try {
    const gradcheck::OpCase op{
        .inputs = {{3, 41}},
        .build = [](engine::Tape& tape, const std::vector<engine::Tensor>& x,
                    std::vector<engine::Parameter>&) { return squared_relu(tape, x[0]); }};
    gradcheck::check_gradients(op);
    gradcheck::check_bf16(op);
    if constexpr (engine::kCudaBuilt) {
      if (engine::cuda::num_devices() > 0) {
        const gradcheck::OpRun cpu = gradcheck::run_op(op),
                               gpu = gradcheck::run_op(op, {.on_cuda = true});
        gradcheck::check_close(gpu.y, cpu.y, 0, "y");
        gradcheck::check_close(gpu.grads[0], cpu.grads[0], 0, "dx");
        std::puts("the GPU agrees");
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
