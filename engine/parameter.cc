#include "engine/parameter.h"

#include <algorithm>

#include "engine/elementwise.h"

namespace tessera::engine {

void Init::write(float* dst, std::int64_t begin, std::int64_t numel, std::string_view name,
                 std::uint64_t seed) const {
  const RandomStream random{seed, fnv1a(name)};
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto index = static_cast<std::uint64_t>(begin + i);
    switch (kind) {
      case Kind::kZeros:
        dst[i] = 0;
        break;
      case Kind::kOnes:
        dst[i] = 1;
        break;
      case Kind::kNormal:
        dst[i] = scale * random.normal(index);
        break;
      case Kind::kUniform:
        dst[i] = scale * (2 * random.uniform(index) - 1);
        break;
    }
  }
}

std::string Init::str() const {
  switch (kind) {
    case Kind::kZeros:
      return "zeros";
    case Kind::kOnes:
      return "ones";
    case Kind::kNormal:
      return fmt::format("normal {}", scale);
    case Kind::kUniform:
      return fmt::format("uniform {}", scale);
  }
  return "?";
}

void materialize(const std::vector<Parameter*>& parameters, const Memory& memory,
                 std::uint64_t seed, DType dtype, DType grad_dtype) {
  for (Parameter* p : parameters) {
    const std::int64_t numel = p->shape.numel();
    std::vector<float> master(static_cast<std::size_t>(numel));
    p->init.write(master.data(), 0, numel, p->name, seed);
    p->value = Tensor::empty(memory, p->shape, dtype, p->name, Category::kParameterShard);
    dispatch_float(dtype, "materialize", [&](auto t) {
      std::vector<decltype(t)> values(master.size());
      cast(values.data(), master.data(), numel);
      p->value.copy_from_host(values.data(), numel);
    });
    if (p->trainable) {
      p->grad = Tensor::zeros(memory, p->shape, grad_dtype, p->name, Category::kGradient);
    }
    p->grad_written = false;
  }
}

}  // namespace tessera::engine
