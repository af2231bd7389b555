#include "engine/parameter.h"

namespace tessera::engine {

void materialize(const std::vector<Parameter*>& parameters, const Memory& memory,
                 std::uint64_t seed, DType dtype, DType grad_dtype) {
  const Stream stream = init_stream(memory);
  for (Parameter* p : parameters) {
    p->value = Tensor::empty(memory, p->shape, dtype, p->name, Category::kParameterShard);
    launch_init(stream, p->init, p->value, 0, p->name, seed);
    if (p->trainable) {
      p->grad = Tensor::zeros(memory, p->shape, grad_dtype, p->name, Category::kGradient);
    }
    p->grad_written = false;
  }
  stream.synchronize();
}

}  // namespace tessera::engine
