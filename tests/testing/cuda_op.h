// Ops on a GPU against the same ops on the CPU, with the cases and the harness of gradcheck.h.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/testing/gradcheck.h"

namespace tessera::testing {

/// How far a GPU may be from the CPU, of the largest element of each tensor. Elements that are
/// stored as bf16 may be off by one unit in the last place of their own besides. 0: equal bits.
struct CudaBounds {
  double f32 = 2e-6;
  double bf16 = 2e-6;  ///< of bf16 ops
};

inline void expect_as_on_cpu(const Values& got, const Values& want, double tolerance, DType dtype,
                             const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  if (tolerance == 0) {
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], want[i]) << what << "[" << i << "]";
    return;
  }
  const double relative = dtype == DType::kBF16 ? 0x1p-7 : 0, range = tolerance * max_abs(want);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double bound = range + relative * std::abs(want[i]) + 1e-12;
    ASSERT_TRUE(std::abs(got[i] - want[i]) <= bound)
        << what << "[" << i << "]: expected " << want[i] << " within " << bound << ", got "
        << got[i];
  }
}

/// Output and gradients of one run with `options` are those of the CPU, and twice the same bits.
/// Returns the run.
inline OpRun check_cuda_run(const OpCase& op, RunOptions options, const CudaBounds& bounds = {}) {
  const bool is_bf16 = options.dtype == DType::kBF16;
  SCOPED_TRACE(fmt::format("{}, gradients {}, uses {}, offset {} of leaf {}",
                           name_of(options.dtype), name_of(options.grad_dtype), options.num_uses,
                           options.offset, options.offset_leaf));
  const OpRun want = run_op(op, options);
  options.on_cuda = true;
  const OpRun got = run_op(op, options), again = run_op(op, options);
  EXPECT_EQ(got.y, again.y) << "y, run twice";
  EXPECT_EQ(got.grads, again.grads) << "gradients, run twice";
  const double tolerance = is_bf16 ? bounds.bf16 : bounds.f32;
  expect_as_on_cpu(got.y, want.y, tolerance, options.dtype, "y");
  for (std::size_t leaf = 0; leaf < want.grads.size(); ++leaf) {
    const bool is_input = leaf < op.inputs.size();
    expect_as_on_cpu(got.grads[leaf], want.grads[leaf], options.num_uses * tolerance,
                     is_input ? options.dtype : options.grad_dtype,
                     "gradient of leaf " + std::to_string(leaf));
  }
  return got;
}

/// The op on a GPU is that of the CPU: f32 and bf16, gradients assigned and added to, leaves
/// aligned and not, all and each alone; and each leaf without gradient leaves the others their
/// bits.
inline void check_cuda(const OpCase& op, const CudaBounds& bounds = {}) {
  constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;
  const OpRun run = check_cuda_run(op, {}, bounds);
  check_cuda_run(op, {.num_uses = 2, .offset = 1}, bounds);
  check_cuda_run(op, {.dtype = kBF16, .grad_dtype = kF32, .num_uses = 2}, bounds);
  check_cuda_run(op, {.dtype = kBF16, .grad_dtype = kBF16, .offset = 3}, bounds);
  check_cuda_run(op, {.dtype = kBF16, .grad_dtype = kBF16, .num_uses = 2}, bounds);
  for (std::size_t without = 0; without < run.grads.size(); ++without) {
    const OpRun fewer = run_op(op, {.on_cuda = true, .without_grad = static_cast<int>(without)});
    for (std::size_t leaf = 0; leaf < run.grads.size(); ++leaf) {
      EXPECT_EQ(fewer.grads[leaf], leaf == without ? Values{} : run.grads[leaf])
          << "leaf " << leaf << " without gradient of leaf " << without;
    }
  }
  for (std::size_t leaf = 0; run.grads.size() > 1 && leaf < run.grads.size(); ++leaf)
    check_cuda_run(op, {.offset = 1, .offset_leaf = static_cast<int>(leaf)}, bounds);
}

}  // namespace tessera::testing
