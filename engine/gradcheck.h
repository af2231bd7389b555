// Checks ops, one's own as well as those of ops/. An OpCase says what an op takes and how to call
// it:
//
//   const OpCase op{.inputs = {{2, 3}, {2, 3}},
//                   .build = [](Tape& tape, const auto& x, auto&) { return mul(tape, x[0], x[1]);
//                   }};
//   check_gradients(op);   // against central differences; sharing, frozen and data leaves
//   check_bf16(op);        // against the f32 op on the same rounded values
//   run_op(op).grads[0]    // for comparisons with a reference of one's own
//
// What is not as expected throws Error, which says what. Any test framework will do.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "engine/parameter.h"
#include "engine/tape.h"

namespace tessera::engine::gradcheck {

using Values = std::vector<double>;

/// An op with its leaves: inputs first, then parameters. Their values are normal with standard
/// deviation `scale`, passed through `transform` if there is one.
struct OpCase {
  std::vector<Shape> inputs = {};
  std::vector<Shape> parameters = {};
  std::function<Tensor(Tape&, const std::vector<Tensor>& x, std::vector<Parameter>& p)> build;
  float scale = 1;
  float (*transform)(float) = nullptr;
};

struct RunOptions {
  DType dtype = DType::kF32;       ///< of inputs, parameters and so of the output
  DType grad_dtype = DType::kF32;  ///< of the gradients of parameters
  bool round_to_bf16 = false;      ///< leaves hold bf16 values even when stored as f32
  int num_uses = 1;                ///< how often the op is applied to the same leaves
  std::int64_t offset = 0;         ///< elements before a leaf or parameter gradient in its buffer
  int offset_leaf = -1;            ///< the leaf that `offset` is for; -1: all
  bool on_cuda = false;            ///< on GPU 0 instead of the CPU
  int without_grad = -1;           ///< leaf that is data or frozen
  int nudged_leaf = -1;            ///< leaf with `nudge` added to one element; no backward then
  std::int64_t nudged_index = 0;
  float nudge = 0;
  LaunchListener* listener = nullptr;  ///< told of every launch; outlives the run
};

/// f = sum over uses u and elements i of r[u][i] y[i], for fixed random r that bf16 can hold.
struct OpRun {
  Values y;
  Values dy;  ///< r of the first use
  double f = 0;
  std::vector<Values> leaves;
  std::vector<Values> grads;  ///< df / dleaf; empty for a leaf without gradient
};

/// Runs the op forward and, unless an element is nudged, backward. Memory is poisoned, so reading
/// what nobody wrote shows as NaN.
OpRun run_op(const OpCase& op, const RunOptions& options = {});

struct GradcheckOptions {
  float eps = 1e-2f;
  double tolerance = 3e-3;  ///< of the largest gradient of the leaf
  std::int64_t max_samples =
      12;  ///< elements tried per leaf, spread evenly, first and last included
};

/// Gradients of the f32 op equal central differences, for one and for two uses of the same leaves
/// (so that the second use accumulates); and when one leaf wants no gradient, the others get the
/// same bits and that one gets none.
/// Throws Error where they are not.
void check_gradients(const OpCase& op, const GradcheckOptions& options = {});

/// The bf16 op equals the f32 op on the same bf16 values within `tolerance` of the range of each
/// tensor; gradients of parameters both as bf16 and as f32. One rounding is 2^-8. Throws Error if
/// it does not.
void check_bf16(const OpCase& op, double tolerance = 0x1p-8);

/// Throws Error unless |got - want| <= tolerance * max|want| everywhere: tolerance is relative to
/// the range of the tensor, since elements that cancel keep the error of their terms.
void check_close(const Values& got, const Values& want, double tolerance, std::string_view what);

double max_abs(const Values& v);
/// `t` may be on any device, f32 or bf16.
Values to_values(const Tensor& t);
/// `values` rounded to `dtype`, `offset` elements into a buffer of their own.
Tensor to_tensor(const Memory& memory, const Shape& shape, const std::vector<float>& values,
                 DType dtype, std::int64_t offset = 0);
/// Normal with standard deviation `scale`; streams are independent of each other.
std::vector<float> random_values(std::int64_t numel, std::uint64_t stream, float scale = 1,
                                 bool round_to_bf16 = false);

}  // namespace tessera::engine::gradcheck
