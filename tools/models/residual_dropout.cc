#include "tools/models/residual_dropout.h"

#include "ops/dropout.h"

namespace tessera::tools {

engine::Tensor residual_dropout(engine::Tape& tape, const engine::Tensor& x, double p,
                                std::string_view name, const Pass& pass) {
  if (!pass.training || p == 0) return x;
  const std::int64_t sample_numel = x.dim(1) * x.dim(2);
  return ops::dropout(tape, x, static_cast<float>(p), {pass.seed, engine::fnv1a(name)},
                      static_cast<std::uint64_t>(pass.first_sample * sample_numel),
                      {pass.samples_before, sample_numel});
}

}  // namespace tessera::tools
