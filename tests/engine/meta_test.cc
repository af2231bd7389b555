// Devices that are not there: books, clocks, and no memory.
#include "engine/meta.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

using testing::error_of;
using testing::has;

constexpr MetaRates kRates = {
    .flops_per_s = 1e9, .bytes_per_s = 1e9, .link_bytes_per_s = 1e9, .link_latency_s = 1e-6};

struct Log : LaunchListener {
  void on_launch(const LaunchRecord& r) noexcept override {
    seen.emplace_back(r.stream, r.begin_ns, r.end_ns);
  }
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> seen;
};

TEST(Meta, KeepsBooksAndHasNoMemory) {
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates);
  const Memory memory(compute);
  EXPECT_EQ(to_string(memory.device()), "meta cpu:0");
  EXPECT_FALSE(memory.device().is_host());
  // More than this machine has.
  const Tensor large = Tensor::zeros(memory, {std::int64_t{1} << 36}, DType::kF32, "large");
  EXPECT_EQ(memory.stats().total_nbytes, std::int64_t{1} << 38);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { static_cast<void>(large.span<float>()); }),
                  {"meta cpu:0", "large"}));
  const Tensor one = Tensor::from<float>(memory, {}, std::vector{1.0f}, "one");
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { one.item(); }), {"meta cpu:0", "one"}));
  EXPECT_NE(large.raw(), one.raw());
}

TEST(MetaDeathTest, AddressesCannotBeRead) {
  const Memory memory(Stream::meta("compute", DeviceKind::kCpu, kRates));
  const Tensor t = Tensor::empty(memory, {4}, DType::kF32);
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(t.data<float>())), "");
}

TEST(Meta, IsNotMixedWithOtherDevices) {
  const Stream meta = Stream::meta("compute", DeviceKind::kCpu, kRates);
  const Tensor here = Tensor::zeros(Memory(), {4}, DType::kF32, "here");
  const Tensor nowhere = Tensor::zeros(Memory(meta), {4}, DType::kF32, "nowhere");
  const auto error = [&](const Tensor& dst, const Tensor& src) {
    return error_of<InvalidArgument>([&] { copy(dst, src, meta); });
  };
  EXPECT_TRUE(has(error(here, nowhere), {"[copy]", "meta cpu:0", "here", "nowhere"}));
  EXPECT_TRUE(has(error(nowhere, here), {"[copy]", "meta cpu:0", "here", "nowhere"}));
  EXPECT_THROW(copy(nowhere, nowhere, Stream::inline_cpu("cpu")), InvalidArgument);
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { meta_now_ns(Stream::inline_cpu("cpu")); }),
                  {"[meta]", "cpu:0"}));
}

TEST(Meta, RunsNothing) {
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates);
  bool ran = false;
  compute.launch({.name = "work"}, [&] { ran = true; });
  compute.sibling("gather").launch({.name = "work"}, [&] { ran = true; });
  compute.host_worker("host").launch({.name = "work"}, [&] { ran = true; });
  compute.launch(
      {.name = "work"}, [&] { ran = true; }, [&](const auto&) { ran = true; });
  EXPECT_FALSE(ran);
  EXPECT_TRUE(compute.sibling("gather").device().is_meta);
  EXPECT_FALSE(Stream::inline_cpu("cpu").host_worker("host").device().is_meta);
}

// Of a GPU, whose functions only enqueue: they say which workspace they need.
TEST(Meta, AsksWhatEnqueuesForGpus) {
  if (!kCudaBuilt) {
    EXPECT_TRUE(
        has(error_of<DeviceError>([] { Stream::meta("compute", DeviceKind::kCuda, kRates); }),
            {"compute", "expected a build with CUDA"}));
    return;
  }
  const Stream compute = Stream::meta("compute", DeviceKind::kCuda, kRates);
  const Memory memory(compute);
  EXPECT_EQ(to_string(memory.device()), "meta cuda:0");
  compute.launch(
      {.name = "work"}, [] {},
      [&](const auto&) { Tensor::empty(memory, {100}, DType::kF32, "t", Category::kWorkspace); });
  EXPECT_EQ(memory.stats().peak_nbytes[static_cast<std::size_t>(Category::kWorkspace)], 400);
  const Tensor x = Tensor::zeros(memory, {100}, DType::kF32);
  launch_assign_or_add(compute, x, x, true, "add");
  EXPECT_EQ(Memory::pinned(compute).device().kind, DeviceKind::kPinned);
}

TEST(Meta, LaunchesTakeTheLongerOfWorkAndBytes) {
  Log log;
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates, {.listener = &log});
  compute.launch({.name = "a", .flops = 5000, .bytes_read = 1000, .bytes_written = 1000}, [] {});
  compute.launch({.name = "b", .flops = 500, .bytes_read = 1000, .bytes_written = 1000}, [] {});
  ASSERT_EQ(log.seen.size(), 2u);
  EXPECT_EQ(log.seen[0], std::tuple("compute", 0, 5000));
  EXPECT_EQ(log.seen[1], std::tuple("compute", 5000, 7000));
  EXPECT_EQ(meta_now_ns(compute), 7000);
}

TEST(Meta, TimesThatCannotBeCountedAreRefused) {
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates);
  compute.launch({.name = "a", .flops = 8e18}, [] {});
  EXPECT_EQ(meta_now_ns(compute), 8'000'000'000'000'000'000);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { compute.launch({.name = "b", .flops = 1e18}, [] {}); }),
          {"[meta] expected less than 100000 days", "got 1.04e+05 with b (on compute)"}));
  for (const double flops : {1e300, std::numeric_limits<double>::infinity()}) {
    error_of<InvalidArgument>([&] { compute.launch({.name = "b", .flops = flops}, [] {}); });
  }
  const Stream far = Stream::meta("far", DeviceKind::kCpu, {.link_latency_s = 1e10});
  error_of<InvalidArgument>([&] { far.launch({.name = "send", .bytes_sent = 1}, [] {}); });
}

TEST(Meta, WaitingMovesTheClock) {
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates);
  const Stream gather = compute.sibling("gather");
  gather.launch({.name = "all_gather", .bytes_sent = 9000}, [] {});  // and a latency of 1000 ns
  const Event gathered = gather.record("gathered");
  EXPECT_TRUE(gathered.reached());
  compute.launch({.name = "a", .flops = 4000}, [] {});
  compute.wait(gathered);
  EXPECT_EQ(meta_now_ns(compute), 10000);
  EXPECT_EQ(compute.blocked_ns(), 6000);
  compute.wait(gathered);
  compute.wait(Event());
  EXPECT_EQ(compute.blocked_ns(), 6000);
}

TEST(Meta, StreamsShareOneLink) {
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, kRates);
  const Stream gather = compute.sibling("gather"), reduce = compute.sibling("reduce");
  gather.launch({.name = "all_gather", .bytes_sent = 1000}, [] {});
  reduce.launch({.name = "reduce_scatter", .bytes_sent = 3000}, [] {});
  EXPECT_EQ(meta_now_ns(gather), 2000);
  EXPECT_EQ(meta_now_ns(reduce), 6000);
  const Stream other = Stream::meta("compute", DeviceKind::kCpu, kRates);
  other.launch({.name = "all_gather", .bytes_sent = 1000}, [] {});
  EXPECT_EQ(meta_now_ns(other), 2000) << "another rank has its own";
}

// Copies go one after the other in each direction, and threads of the host share its memory,
// whatever the device's rates are.
TEST(Meta, TheHostHasALinkAndAMemoryOfItsOwn) {
  MetaRates rates = kRates;
  rates.host_link_bytes_per_s = 5e8;
  rates.host_bytes_per_s = 25e7;
  const Stream compute = Stream::meta("compute", DeviceKind::kCpu, rates);
  const Stream up = compute.sibling("up"), more = compute.sibling("more up");
  const Stream down = compute.sibling("down");
  const Memory memory(compute), pinned = Memory::pinned(compute);
  const Tensor device = Tensor::empty(memory, {1000}, DType::kU8);
  const Tensor host = Tensor::empty(pinned, {1000}, DType::kU8);
  copy(device, host, up, "up");
  copy(device, host, more, "up");
  copy(host, device, down, "down");
  EXPECT_EQ(meta_now_ns(up), 2000);
  EXPECT_EQ(meta_now_ns(more), 4000);
  EXPECT_EQ(meta_now_ns(down), 2000);
  copy(host, device, down, "down");
  EXPECT_EQ(meta_now_ns(down), 4000);
  copy(device, Tensor::empty(memory, {1000}, DType::kU8), compute, "on the device");
  EXPECT_EQ(meta_now_ns(compute), 2000) << "1,000 bytes read and written";
  const Stream first = compute.host_worker("host"), second = compute.host_worker("host 1");
  first.launch({.name = "update", .flops = 1e9, .bytes_read = 600, .bytes_written = 400}, [] {});
  second.launch({.name = "update", .bytes_read = 500}, [] {});
  EXPECT_EQ(meta_now_ns(first), 4000);
  EXPECT_EQ(meta_now_ns(second), 6000);
  compute.launch({.name = "a", .flops = 1000}, [] {});
  EXPECT_EQ(meta_now_ns(compute), 3000) << "the device waits for none of them";
}

TEST(MemoryLimit, NamesWhatGoesBeyondIt) {
  for (const bool is_meta : {false, true}) {
    const Stream compute =
        is_meta ? Stream::meta("compute", DeviceKind::kCpu, kRates) : Stream::inline_cpu("compute");
    const Memory memory(compute, {.limit_nbytes = 1000});
    {
      const Tensor first = Tensor::empty(memory, {150}, DType::kF32, "first");
      EXPECT_TRUE(has(error_of<DeviceError>([&] {
                        Tensor::empty(memory, {101}, DType::kF32, "h.3.weight",
                                      Category::kGradient);
                      }),
                      {"1000", "600", "404", "gradient", "h.3.weight"}));
      const Tensor second = Tensor::empty(memory, {100}, DType::kF32, "second");
    }
    const Tensor all = Tensor::empty(memory, {250}, DType::kF32, "all");
    EXPECT_EQ(memory.stats().peak_total_nbytes, 1000);
  }
}

}  // namespace
}  // namespace tessera::engine
