// What reductions over NCCL send, counted by the emulated one.
#include <gtest/gtest.h>

#include <chrono>

#include "comm/nccl.h"
#include "engine/memory.h"
#include "third_party/cuda/emulation/nccl_control.h"

namespace tessera::comm {
namespace {

using engine::DType;

// Bytes that each rank hands NCCL for one reduction of `numel` elements among `size` ranks.
std::int64_t nbytes_per_rank(bool scatters, DType dtype, bool canonical, Accumulate accumulate,
                             int size, std::int64_t numel) {
  std::int64_t nbytes = 0;
  run_nccl_ranks(size, {.deadline = std::chrono::hours(1), .canonical = canonical},
                 [&](ProcessGroup& group) {
                   const Stream stream = Stream::cuda("comm", group.rank());
                   const engine::Memory memory(stream);
                   const Tensor in = Tensor::zeros(memory, {numel}, dtype, "in");
                   const Tensor out =
                       Tensor::zeros(memory, {scatters ? numel / size : numel}, DType::kF32, "out");
                   group.barrier("begin");
                   if (group.rank() == 0) cuda_emulation::reset_nccl();
                   group.barrier("counted from here");
                   if (scatters) {
                     group.reduce_scatter(in, out, accumulate, stream, "scatter");
                   } else {
                     group.all_reduce(in, out, accumulate, stream, "reduce");
                   }
                   stream.synchronize();
                   group.barrier("end");
                   if (group.rank() == 0) nbytes = cuda_emulation::nccl_nbytes() / size;
                   group.barrier("read");
                 });
  return nbytes;
}

TEST(NcclBytesTest, AReductionSendsItsInputAsItIs) {
  constexpr int kSize = 4;
  constexpr std::int64_t kNumel = 64 * kSize * 3;
  for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::int64_t in_nbytes = kNumel * engine::size_of(dtype);
      for (const bool canonical : {false, true}) {
        EXPECT_EQ(nbytes_per_rank(true, dtype, canonical, accumulate, kSize, kNumel), in_nbytes)
            << name_of(dtype) << (canonical ? " canonical" : " fast");
      }
      EXPECT_EQ(nbytes_per_rank(false, dtype, false, accumulate, kSize, kNumel), in_nbytes);
      // Parts as they are, then f32 sums of a part to each of the others.
      EXPECT_EQ(nbytes_per_rank(false, dtype, true, accumulate, kSize, kNumel),
                in_nbytes + (kSize - 1) * kNumel / kSize * 4);
    }
  }
}

}  // namespace
}  // namespace tessera::comm
