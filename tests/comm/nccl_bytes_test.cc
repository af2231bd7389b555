// What reductions over NCCL send, counted by the emulated one.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/meta.h"
#include "comm/nccl.h"
#include "engine/memory.h"
#include "engine/meta.h"
#include "tests/emulator/nccl_control.h"

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

// What a rank counts is what it hands over, and a plan says the same: for each collective, fast and
// in the order of ranks, with parts that are alike and that are not.
TEST(NcclBytesTest, EachRankCountsWhatItSends) {
  constexpr int kSize = 4;
  for (const bool canonical : {false, true}) {
    for (const std::int64_t part : {std::int64_t{5}, std::int64_t{64}, std::int64_t{100}}) {
      run_nccl_ranks(kSize, {.deadline = std::chrono::hours(1), .canonical = canonical},
                     [&](ProcessGroup& group) {
                       const int rank = group.rank();
                       const auto call_all = [&](ProcessGroup& world, const engine::Memory& memory,
                                                 const Stream& stream) {
                         std::vector<std::int64_t> sent;
                         std::int64_t before = world.traffic().bytes_sent;
                         const auto count = [&] {
                           const std::int64_t now = world.traffic().bytes_sent;
                           sent.push_back(now - before);
                           before = now;
                         };
                         const Tensor mine = Tensor::empty(memory, {part}, DType::kF32);
                         const Tensor all = Tensor::empty(memory, {kSize * part}, DType::kF32);
                         const Tensor half = Tensor::empty(memory, {kSize * part}, DType::kBF16);
                         const Tensor other = Tensor::empty(memory, {kSize * part}, DType::kF32);
                         world.all_gather(mine, all, stream, "a");
                         count();
                         world.reduce_scatter(all, mine, Accumulate::kNo, stream, "b");
                         count();
                         world.reduce_scatter(half, mine, Accumulate::kYes, stream, "c");
                         count();
                         world.all_reduce(all, other, Accumulate::kYes, stream, "d");
                         count();
                         world.all_reduce(half, other, Accumulate::kNo, stream, "e");
                         count();
                         world.broadcast(all, 1, stream, "f");
                         count();
                         world.all_to_all(all, other, stream, "g");
                         count();
                         return sent;
                       };
                       const Stream stream = Stream::cuda("comm", rank);
                       const auto measured = call_all(group, engine::Memory(stream), stream);
                       stream.synchronize();
                       const auto meta = make_meta_rank(
                           rank, kSize, {.sums_in_rank_order = canonical, .stages = true});
                       const Stream planned =
                           Stream::meta("comm", engine::DeviceKind::kCuda, engine::MetaRates());
                       EXPECT_EQ(measured, call_all(*meta, engine::Memory(planned), planned))
                           << "rank " << rank << (canonical ? " canonical" : " fast") << " "
                           << part;
                       if (!canonical) {
                         EXPECT_EQ(measured[4], 2 * 3 * part * 2) << "bf16 both ways";
                       }
                     });
    }
  }
}

}  // namespace
}  // namespace tessera::comm
