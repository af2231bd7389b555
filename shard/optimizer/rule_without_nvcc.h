// For rules of one's own that a C++ compiler alone builds, against a library that was built with
// CUDA: what makes their optimizers includes this in place of a .cu file (see rule_optimizer.h), or
// is compiled with -include shard/optimizer/rule_without_nvcc.h. They update on CPUs, and on a GPU
// their optimizers cannot be made: DeviceError. Those of the library have their kernels as before.
// A program has either this or the .cu file, not both.
#pragma once

#include "engine/error.h"
#include "shard/optimizer/rule_optimizer.h"

namespace tessera::shard {
namespace internal {

[[noreturn]] inline void refuse_rule_without_nvcc() {
  engine::fail<engine::DeviceError>(
      "[optimizer] expected kernels that nvcc compiled, got a rule that was built without, for "
      "CPUs: shard/optimizer/rule_optimizer.h says what a .cu file is to instantiate");
}

}  // namespace internal

template <class Rule>
std::int64_t RuleKernels<Rule>::step_nbytes(std::int64_t /*num_groups*/) {
  internal::refuse_rule_without_nvcc();
}

template <class Rule>
void RuleKernels<Rule>::prepare(const engine::Stream& /*stream*/, const engine::Tensor& /*step*/,
                                const Rule& /*rule*/, const ClipCuda& /*clip*/,
                                const RatesCuda& /*rates*/) {
  internal::refuse_rule_without_nvcc();
}

template <class Rule>
void RuleKernels<Rule>::update(const engine::Stream& /*stream*/, const engine::Tensor& /*step*/,
                               const UpdatedCuda& /*updated*/,
                               const std::array<float*, Rule::kNumStates>& /*states*/) {
  internal::refuse_rule_without_nvcc();
}

}  // namespace tessera::shard
