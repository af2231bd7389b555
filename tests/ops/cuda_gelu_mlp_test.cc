// The two layers around GELU on a GPU: against the CPU, and against the same ops one by one.
#include <algorithm>
#include <memory>
#include <set>
#include <string>

#include "engine/gemm/gemm_algorithms.h"
#include "ops/add.h"
#include "ops/linear.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

// x (..., I) to `hidden` columns and back to `out`.
OpCase mlp_case(const Shape& x, std::int64_t hidden, std::int64_t out, WeightLayout layout,
                bool apart = false) {
  const bool in_out = layout == WeightLayout::kInOut;
  const std::int64_t in = x.dim(-1);
  return {.inputs = {x},
          .parameters = {in_out ? Shape{in, hidden} : Shape{hidden, in},
                         {hidden},
                         in_out ? Shape{hidden, out} : Shape{out, hidden},
                         {out}},
          .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
            if (!apart) return gelu_mlp(tape, leaves[0], p[0], p[1], p[2], &p[3], layout);
            const Tensor y = linear_gelu(tape, leaves[0], p[0], p[1], layout);
            return linear(tape, y, p[2], &p[3], layout);
          }};
}

// Two products and GELU between them; in bf16 what rounds to a neighbour goes through all three.
constexpr CudaBounds kBounds{.f32 = 1e-5, .bf16 = 0x1p-6};

TEST(CudaGeluMlpTest, IsThatOfTheCpuWithTheBitsOfItsOps) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    for (const Shape& x : {Shape{2, 3, 32}, Shape{31, 33}, Shape{1, 8}, Shape{300, 16}}) {
      for (const std::int64_t hidden : {48, 13}) {
        check_cuda(mlp_case(x, hidden, 24, layout), kBounds);
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          const RunOptions options{.dtype = dtype, .num_uses = 2, .on_cuda = true};
          const OpRun one = run_op(mlp_case(x, hidden, 24, layout), options),
                      apart = run_op(mlp_case(x, hidden, 24, layout, true), options);
          EXPECT_EQ(one.y, apart.y);
          EXPECT_EQ(one.grads, apart.grads);
        }
      }
    }
  }
}

TEST(CudaGeluMlpTest, NoRowsGiveZeroGradients) {
  const OpRun run = run_op(mlp_case({0, 16}, 24, 8, WeightLayout::kInOut),
                           {.dtype = DType::kBF16, .on_cuda = true});
  EXPECT_TRUE(run.y.empty());
  EXPECT_EQ(run.grads[2], Values(24, 0));
}

// By name.
class Launches : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    names_.emplace(record.work.name);
    if (record.work.name == "linear.backward_bias") bias_nbytes_.insert(record.work.bytes_read);
  }
  bool has(const std::string& name) const { return names_.contains(name); }
  const std::multiset<std::int64_t>& bias_nbytes() const { return bias_nbytes_; }

 private:
  std::set<std::string> names_;
  std::multiset<std::int64_t> bias_nbytes_;
};

TEST(CudaGeluMlpTest, StoresNoGradientOfWhatGeluGives) {
  constexpr std::int64_t kRows = 300, kHidden = 48, kOut = 24, kNumParts = 3;
  for (const bool apart : {false, true}) {
    Launches launches;
    run_op(mlp_case({kRows, 16}, kHidden, kOut, WeightLayout::kInOut, apart),
           {.on_cuda = true, .listener = &launches});
    EXPECT_EQ(launches.has("linear_gelu.backward_x"), !apart);
    EXPECT_EQ(launches.has("gelu.backward"), apart);
    // The sums of the inner layer's gradient are left beside it either way.
    EXPECT_EQ(launches.bias_nbytes(),
              std::multiset<std::int64_t>({kNumParts * kHidden * 4, kRows * kOut * 4}));
  }
}

// Recorded: the products, of which some have a slope.
OpCase recorded(OpCase op, const std::shared_ptr<std::vector<engine::DeviceProduct>>& gemms,
                const std::shared_ptr<engine::GemmAlgorithms>& algorithms) {
  op.build = [=, build = op.build](Tape& tape, const std::vector<Tensor>& x,
                                   std::vector<Parameter>& p) {
    if constexpr (engine::kCudaBuilt) {
      if (tape.stream().device().is_cuda()) {
        engine::set_gemm_algorithms(tape.stream(), algorithms);
        engine::record_gemms(tape.stream(), gemms);
      }
    }
    return build(tape, x, p);
  };
  return op;
}

bool has_slope(const engine::DeviceProduct& gemm) { return gemm.slope.at.data != nullptr; }

TEST(CudaGeluMlpTest, SlopeIsChosenByTimeAndKept) {
  if constexpr (engine::kCudaBuilt) {
    const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
    const auto chosen = std::make_shared<engine::GemmAlgorithms>();
    const OpCase op = recorded(mlp_case({64, 32}, 48, 32, WeightLayout::kInOut), gemms, chosen);
    for (const DType dtype : {DType::kF32, DType::kBF16})
      run_op(op, {.dtype = dtype, .on_cuda = true});
    EXPECT_EQ(std::ranges::count_if(*gemms, has_slope), 1) << "of bf16 alone";
    const engine::Stream idle = engine::Stream::cuda("tuning", 0);
    std::size_t num_slopes = 0;
    for (const engine::TunedGemm& t : engine::tune_gemms(idle, *gemms, *chosen)) {
      if (!has_slope(t.gemm)) continue;
      ++num_slopes;
      EXPECT_GE(t.num_proposed, 1);
      EXPECT_LE(t.ms, t.first_ms);
      EXPECT_EQ(t.algorithm == "GELU apart", t.ms == t.first_ms) << t.algorithm;
    }
    EXPECT_EQ(num_slopes, 1u);
    EXPECT_TRUE(engine::tune_gemms(idle, *gemms, *chosen).empty());
    EXPECT_TRUE(chosen->text().find(" | gelu slope | sums\t") != std::string::npos)
        << chosen->text();
    check_cuda_run(op, {.dtype = DType::kBF16}, kBounds);
  } else {
    FAIL() << "built without CUDA";
  }
}

// GELU's output is used twice, or a layer is something else: no product is asked for a slope, and
// both uses reach the gradient.
TEST(CudaGeluMlpTest, OtherUsesOfGeluAreAsBefore) {
  const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
  const auto none = std::make_shared<engine::GemmAlgorithms>();
  OpCase op = mlp_case({64, 32}, 48, 48, WeightLayout::kInOut);
  op.build = [](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
    const Tensor y = linear_gelu(tape, x[0], p[0], p[1]);
    return add(tape, y, linear(tape, y, p[2], &p[3]));
  };
  op = recorded(op, gemms, none);
  check_cuda(op, kBounds);
  EXPECT_FALSE(gemms->empty());
  EXPECT_EQ(std::ranges::count_if(*gemms, has_slope), 0);
}

}  // namespace
}  // namespace tessera::ops
