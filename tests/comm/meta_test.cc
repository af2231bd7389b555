// Ranks that are not there, and the bytes that collectives state.
#include "comm/meta.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/meta.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using testing::error_of;
using testing::has;

Stream meta_stream() { return Stream::meta("compute", engine::DeviceKind::kCpu, {}); }

Tensor floats(const Memory& memory, std::int64_t numel) {
  return Tensor::empty(memory, {numel}, DType::kF32);
}

// One of each, on groups that are split as a mesh splits them.
void call_all(ProcessGroup& world, const Memory& memory, const Stream& stream) {
  const int n = world.size();
  const Tensor part = floats(memory, 5), whole = floats(memory, 5 * n);
  const Tensor half = Tensor::empty(memory, {5 * n}, DType::kBF16);
  world.all_gather(part, whole, stream, "a");
  world.reduce_scatter(whole, part, Accumulate::kNo, stream, "b");
  world.reduce_scatter(half, part, Accumulate::kNo, stream, "c");
  world.all_reduce(whole, whole, Accumulate::kNo, stream, "d");
  world.all_reduce(half, whole, Accumulate::kNo, stream, "e");
  world.broadcast(whole, 1, stream, "f");
  world.all_to_all(whole, floats(memory, 5 * n), stream, "g");
}

TEST(MetaGroup, CountsAsRanksOfThreadsDo) {
  constexpr int kRanks = 4;
  Traffic of_threads;
  run_ranks(kRanks, {}, [&](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    const auto row = world.split_by([](int r) { return r / 2; });
    call_all(world, Memory(), stream);
    call_all(*row, Memory(), stream);
    stream.synchronize();
    EXPECT_EQ(row->size(), 2);
    if (world.rank() == 3) {
      EXPECT_EQ(row->rank(), 1);
      of_threads = world.traffic();
      EXPECT_EQ(row->traffic(), of_threads) << "of all groups of a world together";
    }
  });
  const auto world = make_meta_rank(3, kRanks);
  const Stream stream = meta_stream();
  const auto row = world->split_by([](int r) { return r / 2; });
  EXPECT_EQ(row->size(), 2);
  EXPECT_EQ(row->rank(), 1);
  call_all(*world, Memory(stream), stream);
  call_all(*row, Memory(stream), stream);
  EXPECT_EQ(world->traffic(), of_threads);
  EXPECT_EQ(of_threads.num_collectives, 14);
}

// What a rank of 4 sends, from 5 f32 a rank: by hand.
TEST(MetaGroup, StatesWhatARankSends) {
  std::vector<std::string> seen;
  const auto world = make_meta_rank(
      0, 4, {.on_collective = [&](const Collective& c, const std::vector<int>&, const Stream&) {
        seen.push_back(fmt::format("{} {}", c.work.detail, c.work.bytes_sent));
      }});
  const Stream stream = meta_stream();
  call_all(*world, Memory(stream), stream);
  EXPECT_EQ(seen,
            (std::vector<std::string>{"a 60", "b 60", "c 30", "d 120", "e 90", "f 60", "g 60"}));
}

// What these calls send over NCCL: its own all-reduce of bf16 is bf16 both ways, and in the order
// of ranks so few elements are all of rank 0, which sends the f32 sums.
TEST(MetaGroup, StatesWhatARankOverNcclSends) {
  const auto sent = [](int rank, bool in_order) {
    std::vector<std::int64_t> bytes;
    const auto world = make_meta_rank(
        rank, 4,
        {.sums_in_rank_order = in_order,
         .stages = true,
         .on_collective = [&](const Collective& c, const std::vector<int>&, const Stream&) {
           bytes.push_back(c.work.bytes_sent);
         }});
    const Stream stream = meta_stream();
    call_all(*world, Memory(stream), stream);
    std::int64_t sum = 0;
    for (const std::int64_t b : bytes) sum += b;
    EXPECT_EQ(world->traffic().bytes_sent, sum);
    return bytes;
  };
  using Bytes = std::vector<std::int64_t>;
  EXPECT_EQ(sent(0, false), (Bytes{60, 60, 30, 120, 60, 60, 60}));
  EXPECT_EQ(sent(3, false), (Bytes{60, 60, 30, 120, 60, 60, 60}));
  EXPECT_EQ(sent(0, true), (Bytes{60, 60, 30, 240, 240, 60, 60}));
  EXPECT_EQ(sent(3, true), (Bytes{60, 60, 30, 80, 40, 60, 60}));
}

// Three processes of two ranks: what goes from process to process needs pieces of sums, groups with
// one rank in each process need blocks of all of them, and those inside a process nothing.
TEST(MetaGroup, NeedsMemoryWhereAHybridDoes) {
  const auto needs = [](const std::function<int(int rank)>& color) {
    const auto world = make_meta_rank(2, 6, {.stages = true, .ranks_per_process = 2});
    const auto group = world->split_by(color);
    const Stream stream = meta_stream();
    const Memory memory(stream);
    constexpr std::int64_t kNumel = 1 << 20;
    const Tensor in = floats(memory, kNumel), out = floats(memory, kNumel);
    const std::int64_t before = memory.stats().total_nbytes;
    group->all_reduce(in, out, Accumulate::kNo, stream, "a");
    return std::pair(memory.stats().total_nbytes - before, group->traffic().bytes_sent);
  };
  using Needs = std::pair<std::int64_t, std::int64_t>;
  constexpr std::int64_t kNbytes = 4 << 20;
  EXPECT_EQ(needs([](int) { return 0; }), Needs(2 * 65536 * 4, 2 * kNbytes - 2 * kNbytes / 6));
  EXPECT_EQ(needs([](int r) { return r / 2; }), Needs(0, kNbytes));
  // Three parts, of which the second is rounded up to 64 elements.
  constexpr std::int64_t kPart = 349'568;
  EXPECT_EQ(needs([](int r) { return r % 2; }),
            Needs(3 * kPart * 4, (1048576 - kPart) * 4 + 2 * kPart * 4));
  // Of ranks 0 to 2 and 3 to 5, two share a process.
  EXPECT_EQ(needs([](int r) { return r / 3; }).first, 2 * 65536 * 4);
}

TEST(MetaGroup, SplitsWithoutPeers) {
  const auto world = make_meta_rank(4, 6, {.sums_in_rank_order = false});
  EXPECT_FALSE(world->sums_in_rank_order());
  const auto odd = world->split_by([](int r) { return r % 2; });
  EXPECT_EQ(odd->rank(), 2);
  EXPECT_EQ(odd->size(), 3);
  EXPECT_FALSE(odd->sums_in_rank_order());
  const auto alone = odd->split_by([](int r) { return r; });
  EXPECT_EQ(alone->size(), 1);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { world->split(0, 0); }), {"split_by()", "4"}));
}

TEST(MetaGroup, TellsBetweenWhichRanks) {
  std::vector<std::vector<int>> seen;
  const auto world = make_meta_rank(
      3, 6, {.on_collective = [&](const Collective&, const std::vector<int>& ranks, const Stream&) {
        seen.push_back(ranks);
      }});
  const auto odd = world->split_by([](int r) { return r % 2; });
  const auto last_two = odd->split_by([](int r) { return r == 0; });
  const Stream stream = meta_stream();
  for (ProcessGroup* group : {world.get(), odd.get(), last_two.get()}) {
    group->all_reduce(floats(Memory(stream), 1), floats(Memory(stream), 1), Accumulate::kNo, stream,
                      "a");
  }
  EXPECT_EQ(seen, (std::vector<std::vector<int>>{{0, 1, 2, 3, 4, 5}, {1, 3, 5}, {3, 5}}));
}

TEST(MetaGroup, SaysWhatIsExpected) {
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { make_meta_rank(2, 2); }), {"[0, 2)", "2"}));
  const auto world = make_meta_rank(0, 2);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    world->all_gather(floats(Memory(), 1), floats(Memory(), 2),
                                      Stream::inline_cpu("cpu"), "a");
                  }),
                  {"[meta]", "cpu:0"}));
  const Stream meta = meta_stream();
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    world->all_gather(floats(Memory(), 1), floats(Memory(meta), 2), meta, "a");
                  }),
                  {"meta cpu:0", "cpu:0"}));
}

}  // namespace
}  // namespace tessera::comm
