// Which kernels attention in bf16 may be asked for, by what a GPU says of itself; and that the
// GPT's gradient of a bias takes what they leave.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/attention.h"
#include "tests/emulator/control.h"
#include "tests/testing/cuda_op.h"
#include "tests/testing/errors.h"
#include "tools/models/gpt.h"
#include "tools/models/model.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

class AttentionKernelsTest : public ::testing::Test {
 protected:
  ~AttentionKernelsTest() override { cuda_emulation::reset(); }
  static void say_capability(int capability) {
    cuda_emulation::Settings settings = cuda_emulation::settings();
    settings.compute_capability = capability;
    cuda_emulation::configure(settings);
  }
};

OpRun run(CudaAttention cuda, std::int64_t head_size) {
  const OpCase op{.inputs = {{1, 500, 3 * head_size}},
                  .build = [=](Tape& tape, const auto& x, auto&) {
                    return attention(tape, x[0], {.cuda = cuda});
                  }};
  return run_op(op, {.dtype = DType::kBF16, .on_cuda = true});
}

TEST_F(AttentionKernelsTest, OtherGpusRefuseWgmmaForEveryHead) {
  for (const int capability : {80, 89, 100, 120}) {
    say_capability(capability);
    const std::string got = std::to_string(capability / 10) + ".x (cuda:0)";
    for (const std::int64_t head_size : {16, 64})
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { run(CudaAttention::kWgmma, head_size); }),
                      {"compute capability 9.x for wgmma", got}));
    EXPECT_EQ(run(CudaAttention::kAuto, 64).grads, run(CudaAttention::kMma, 64).grads);
    EXPECT_TRUE(has(error_of<InvalidArgument>([] {
                      require_attention_kernels(Stream::cuda("compute", 0), CudaAttention::kWgmma);
                    }),
                    {"compute capability 9.x for wgmma", got}));
  }
  require_attention_kernels(Stream::cuda("compute", 0), CudaAttention::kMma);
}

TEST_F(AttentionKernelsTest, TheCpuHasNoWgmma) {
  const Stream cpu = Stream::inline_cpu("compute");
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { require_attention_kernels(cpu, CudaAttention::kWgmma); }),
          {"expected a GPU for wgmma", "got cpu"}));
  require_attention_kernels(cpu, CudaAttention::kMma);
}

// That the choice is one: products of other shapes add in another order.
TEST_F(AttentionKernelsTest, OnlyHeadsThatWgmmaTakesHaveOtherBits) {
  for (const std::int64_t head_size : {34, 64, 98, 128}) {
    const auto wgmma = run(CudaAttention::kWgmma, head_size).grads;
    EXPECT_NE(wgmma, run(CudaAttention::kMma, head_size).grads) << head_size;
    EXPECT_EQ(wgmma, run(CudaAttention::kAuto, head_size).grads) << head_size;
  }
  for (const std::int64_t head_size : {32, 65, 96})
    EXPECT_EQ(run(CudaAttention::kWgmma, head_size).grads,
              run(CudaAttention::kMma, head_size).grads)
        << head_size;
}

// What the gradient of the bias before attention reads, in bytes.
class BiasRead : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    if (record.work.name == "linear.backward_bias" && record.work.detail == "h.0.attn.c_attn.bias")
      nbytes = record.work.bytes_read;
  }
  std::int64_t nbytes = 0;
};

// Of a GPT of one layer with two heads of 64.
std::int64_t bias_read(CudaAttention cuda, std::int64_t tokens) {
  BiasRead read;
  const Stream stream = Stream::cuda("compute", 0, {.listener = &read});
  const Memory memory(stream, {.poison = true});
  Tape tape(memory, stream);
  tools::Gpt gpt(
      {.layers = 1, .heads = 2, .dim = 128, .seq = tokens, .vocab = 16, .cuda_attention = cuda});
  for (Parameter* p : tools::parameters_of(gpt)) {
    p->value = to_tensor(memory, p->shape, random_values(p->shape.numel(), 1), DType::kBF16);
    p->grad = Tensor::zeros(memory, p->shape, DType::kF32, p->name);
  }
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * tokens), 3);
  const Tensor batch = Tensor::from<std::int32_t>(memory, {2, tokens}, ids, "tokens");
  tape.backward(gpt.loss(tape, {batch, batch}, {}));
  stream.synchronize();  // all launches are told
  return read.nbytes;
}

TEST_F(AttentionKernelsTest, TheGptSumsItsBiasFromWhatWgmmaLeaves) {
  constexpr std::int64_t kTokens = 130, kNumParts = 2 * 3, kColumns = 3 * 128;
  EXPECT_EQ(bias_read(CudaAttention::kAuto, kTokens), kNumParts * kColumns * 4);
  EXPECT_EQ(bias_read(CudaAttention::kMma, kTokens), 2 * kTokens * kColumns * 2);
}

}  // namespace
}  // namespace tessera::ops
