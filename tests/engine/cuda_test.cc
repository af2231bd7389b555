// The engine on a GPU: streams, events, memory, copies, elementwise kernels and the tape's own
// work.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

using testing::error_of;

std::vector<float> numbers(std::int64_t numel) {
  std::mt19937 random(static_cast<unsigned>(numel));
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (float& v : values) v = normal(random);
  return values;
}

TEST(Cuda, TensorsGoThereAndBack) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory memory(compute);
  const std::vector<float> values = numbers(1025);
  const Tensor t = Tensor::from<float>(memory, {1025}, values, "x");
  EXPECT_TRUE(t.device().is_cuda());
  EXPECT_EQ(to_vector<float>(t), values);
  EXPECT_EQ(t.slice(3, {1}).item(), values[3]);
  EXPECT_EQ(to_vector<float>(Tensor::zeros(memory, {33}, DType::kF32)), std::vector<float>(33));
  EXPECT_NE(error_of<InvalidArgument>([&] { static_cast<void>(t.span<float>()); }).find("cuda:0"),
            std::string::npos);
}

TEST(Cuda, CopiesBetweenAnyMemories) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory device(compute), pinned = Memory::pinned(compute), plain;
  const std::vector<float> values = numbers(300);
  const Tensor on_host = Tensor::from<float>(plain, {300}, values, "host");
  const Tensor staged = Tensor::empty(pinned, {300}, DType::kF32, "pinned");
  const Tensor on_device = Tensor::empty(device, {300}, DType::kF32, "device");
  const Tensor back = Tensor::empty(pinned, {300}, DType::kF32, "back");
  copy(staged, on_host, compute);
  copy(on_device, staged, compute);
  copy(back, on_device, compute);
  compute.synchronize();
  EXPECT_EQ(to_vector<float>(back), values);
  EXPECT_EQ(pinned.device().kind, DeviceKind::kPinned);
  const Stream cpu = Stream::inline_cpu("cpu");
  EXPECT_THROW(copy(on_host, on_device, cpu), InvalidArgument);
}

TEST(Cuda, EventsOrderStreams) {
  const Stream compute = Stream::cuda("compute", 0, {.delay_seed = 1});
  const Stream comm = compute.sibling("comm", {.delay_seed = 2});
  EXPECT_EQ(comm.device(), compute.device());
  const Memory memory(compute);
  const Tensor a = Tensor::zeros(memory, {4096}, DType::kF32, "a");
  const Tensor b = Tensor::zeros(memory, {4096}, DType::kF32, "b");
  for (int i = 0; i < 20; ++i) {
    launch_set(compute, a, static_cast<float>(i), "set");
    comm.wait(compute.record("written"));
    launch_assign_or_add(comm, b, a, true, "add");
    compute.wait(comm.record("read"));
  }
  EXPECT_EQ(to_vector<float>(b), std::vector<float>(4096, 190));
}

// f32 and bf16, any mix; sizes with and without tails; addresses that allow wide accesses or not.
// Work of the host, here 1 for the tensor `x`, that begins when `go` is set.
Event fill_when_told(const Stream& host, const Tensor& x, std::promise<void>& go) {
  host.launch({.name = "fill"}, [x, told = go.get_future().share()] {
    told.wait();
    std::ranges::fill(x.span<float>(), 1.0f);
  });
  return host.record("filled");
}

TEST(Cuda, WaitsForTheHostWithoutHoldingUpWhoLaunches) {
  const Stream compute = Stream::cuda("compute", 0), host = Stream::worker_cpu("host");
  const Memory device(compute), pinned = Memory::pinned(compute);
  const Tensor on_device = Tensor::zeros(device, {40}, DType::kF32);
  for (int round = 0; round < 3; ++round) {
    const Tensor x = Tensor::zeros(pinned, {40}, DType::kF32);
    std::promise<void> go;
    const Event filled = fill_when_told(host, x, go);
    EXPECT_FALSE(filled.reached());
    compute.wait(filled);
    copy(on_device, x, compute);
    const Event copied = compute.record("copied");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(copied.reached());
    go.set_value();
    EXPECT_EQ(to_vector<float>(on_device), std::vector<float>(40, 1.0f)) << round;
    launch_fill(compute, on_device, 0, "clear");
  }
}

// Each event has a word of its own, however the hosts overtake each other.
TEST(Cuda, WaitsForManyHostsAtATime) {
  const Stream compute = Stream::cuda("compute", 0), other = compute.sibling("other");
  const Stream hosts[] = {Stream::worker_cpu("a"), Stream::worker_cpu("b")};
  const Memory device(compute), pinned = Memory::pinned(compute);
  const Tensor x = Tensor::zeros(pinned, {2, 40}, DType::kF32);
  const Tensor of_a = Tensor::zeros(device, {40}, DType::kF32);
  const Tensor of_b = Tensor::zeros(device, {40}, DType::kF32);
  std::promise<void> go_a, go_b;
  const Event a = fill_when_told(hosts[0], x.slice(0, {40}), go_a);
  const Event b = fill_when_told(hosts[1], x.slice(40, {40}), go_b);
  other.wait(device.allocated());
  compute.wait(a);
  compute.wait(b);
  other.wait(b);
  copy(of_b, x.slice(40, {40}), other);
  copy(of_a, x.slice(0, {40}), compute);
  const Event copied = compute.record("copied");
  go_b.set_value();
  other.synchronize();
  EXPECT_FALSE(copied.reached());
  go_a.set_value();
  EXPECT_EQ(to_vector<float>(of_a), std::vector<float>(40, 1.0f));
  EXPECT_EQ(to_vector<float>(of_b), std::vector<float>(40, 1.0f));
}

TEST(Cuda, ManyWaitsForTheHostNeedNoMoreMemory) {
  const Stream compute = Stream::cuda("compute", 0), host = Stream::worker_cpu("host");
  for (int i = 0; i < 5000; ++i) {
    host.launch({.name = "nothing"}, [] {});
    compute.wait(host.record("done"));
  }
  compute.synchronize();
}

TEST(Cuda, TellsWhatTheHostFailedWith) {
  const Stream host = Stream::worker_cpu("host");
  const Stream compute = Stream::cuda("compute", 0), later = compute.sibling("later");
  std::promise<void> go;
  host.launch({.name = "fail"}, [told = go.get_future().share()] {
    told.wait();
    throw std::runtime_error("planted");
  });
  const Event failed = host.record("failed");
  compute.wait(failed);
  go.set_value();
  EXPECT_EQ(error_of<std::runtime_error>([&] { compute.synchronize(); }), "planted");
  EXPECT_EQ(error_of<std::runtime_error>([&] { compute.launch({.name = "next"}, [] {}); }),
            "planted");
  EXPECT_EQ(error_of<std::runtime_error>([&] { later.wait(failed); }), "planted");
  EXPECT_NO_THROW(later.synchronize());
}

TEST(Cuda, ElementwiseHasTheBitsOfTheCpu) {
  const Stream compute = Stream::cuda("compute", 0), cpu = Stream::inline_cpu("cpu");
  const Memory device(compute), host;
  for (const std::int64_t numel : {1, 3, 31, 257, 1025}) {
    for (const std::int64_t shift : {0, 1}) {
      for (const DType to : {DType::kF32, DType::kBF16}) {
        for (const DType from : {DType::kF32, DType::kBF16}) {
          for (const bool accumulate : {false, true}) {
            const auto run = [&](const Memory& memory, const Stream& stream) {
              const auto make = [&](DType dtype, unsigned seed) {
                const Tensor wide = Tensor::from<float>(memory, {numel + 1 + seed},
                                                        numbers(numel + 1 + seed), "wide");
                const Tensor t = Tensor::empty(memory, wide.shape(), dtype, "t");
                launch_assign_or_add(stream, t, wide, false, "cast");
                return t.slice(shift, {numel});
              };
              const Tensor dst = make(to, 0), src = make(from, 1);
              launch_assign_or_add(stream, dst, src, accumulate, "run");
              const Tensor wide = Tensor::empty(memory, {numel}, DType::kF32, "wide");
              launch_assign_or_add(stream, wide, dst, false, "widen");
              return to_vector<float>(wide);
            };
            EXPECT_EQ(run(device, compute), run(host, cpu))
                << numel << " " << shift << " " << name_of(to) << " " << name_of(from);
          }
        }
      }
    }
  }
}

TEST(Cuda, FreedMemoryIsReusedInStreamOrder) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory memory(compute);
  const Tensor sum = Tensor::zeros(memory, {1000}, DType::kF32, "sum");
  for (int i = 1; i <= 10; ++i) {  // each dies while its kernels are queued
    const Tensor t = Tensor::empty(memory, {1000}, DType::kF32, "t");
    launch_set(compute, t, static_cast<float>(i), "set");
    launch_assign_or_add(compute, sum, t, true, "add");
  }
  EXPECT_EQ(to_vector<float>(sum), std::vector<float>(1000, 55));
  EXPECT_LT(memory.stats().reserved_nbytes, 3 * 4096);
}

TEST(Cuda, PoisonsWhatNobodyWrote) {
  const Memory memory(Stream::cuda("compute", 0), {.poison = true});
  const Tensor t = Tensor::empty(memory, {7}, DType::kF32, "t");
  for (const float v : to_vector<float>(t)) EXPECT_TRUE(std::isnan(v));
}

// An activation that two ops use: the tape adds its gradients on the device.
TEST(Cuda, TheTapeAddsGradients) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory memory(compute);
  Tape tape(memory, compute);
  const Tensor x = Tensor::from<float>(memory, {3}, std::vector<float>{1, 2, 3}, "x");
  tape.watch(x);
  const auto pass = [&](const Tensor& in, std::string_view name) {
    const Tensor out = tape.empty(in.shape(), in.dtype(), name);
    launch_assign_or_add(compute, out, in, false, "pass");
    tape.record(name, out, [&tape, in](const Tensor& dout) { tape.pass_grad(in, dout); });
    return out;
  };
  const Tensor a = pass(x, "a"), b = pass(x, "b");
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&](const Tensor& dloss) {
    for (const Tensor& in : {a, b}) {
      const GradTarget d = tape.grad_target(in);
      launch_set(compute, d.dst, 2 * dloss.item(), "dloss");
    }
  });
  tape.backward(loss);
  EXPECT_EQ(to_vector<float>(tape.grad(x)), std::vector<float>(3, 4));
}

TEST(Cuda, ListenersHearLaunchesInOrder) {
  struct Listener : LaunchListener {
    void on_launch(const LaunchRecord& record) noexcept override {
      const std::lock_guard lock(mutex);
      names.emplace_back(record.work.name);
      ordered = ordered && record.begin_ns <= record.end_ns && record.begin_ns >= last;
      last = record.end_ns;
    }
    std::mutex mutex;
    std::vector<std::string> names;
    bool ordered = true;
    std::int64_t last = 0;
  } listener;
  const Stream compute = Stream::cuda("compute", 0, {.listener = &listener});
  const Memory memory(compute);
  const Tensor t = Tensor::empty(memory, {7}, DType::kF32, "t");
  launch_set(compute, t, 1, "first");
  launch_fill(compute, t, 0, "second");
  compute.synchronize();
  EXPECT_EQ(listener.names, (std::vector<std::string>{"first", "second"}));
  EXPECT_TRUE(listener.ordered);
}

// A training never synchronises.
TEST(Cuda, ListenersHearWithoutASynchronisation) {
  struct Listener : LaunchListener {
    void on_launch(const LaunchRecord& record) noexcept override {
      ++count;
      ordered = ordered && record.begin_ns <= record.end_ns && record.begin_ns >= last;
      last = record.end_ns;
    }
    int count = 0;
    bool ordered = true;
    std::int64_t last = 0;
  } listener;
  const Stream compute = Stream::cuda("compute", 0, {.listener = &listener});
  const Memory memory(compute);
  const Tensor t = Tensor::empty(memory, {7}, DType::kF32, "t");
  constexpr int kLaunches = 3000, kRound = 100;
  for (int i = 1; i <= kLaunches; ++i) {
    launch_set(compute, t, 1, "set");
    if (i % kRound == 0) compute.record("round").wait();
    ASSERT_GE(listener.count, i - 257 - kRound);
  }
  compute.synchronize();
  EXPECT_EQ(listener.count, kLaunches);
  EXPECT_TRUE(listener.ordered);
}

TEST(Cuda, ListenersHearWhatTheyWantWhenTheStreamEnds) {
  struct Listener : LaunchListener {
    std::optional<std::uint64_t> on_enqueue(const LaunchRequest&) noexcept override {
      ++asked;
      return asked >= 100 && asked < 300 ? std::optional(asked) : std::nullopt;
    }
    void on_launch(const LaunchRecord& record) noexcept override {
      told.push_back(record.ticket);
      ordered = ordered && record.begin_ns <= record.end_ns && record.begin_ns >= last;
      last = record.end_ns;
    }
    std::uint64_t asked = 0;
    std::vector<std::uint64_t> told;
    bool ordered = true;
    std::int64_t last = 0;
  } listener;
  const auto now_ns = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  const std::int64_t begin = now_ns();
  {
    const Stream compute = Stream::cuda("compute", 0, {.listener = &listener});
    const Memory memory(compute);
    const Tensor t = Tensor::empty(memory, {7}, DType::kF32, "t");
    for (int i = 0; i < 310; ++i) launch_set(compute, t, 1, "set");
  }
  std::vector<std::uint64_t> expected(200);
  std::iota(expected.begin(), expected.end(), 100);
  EXPECT_EQ(listener.told, expected);
  EXPECT_TRUE(listener.ordered);
  EXPECT_GE(listener.last, begin);
  EXPECT_LE(listener.last, now_ns() + 1'000'000) << "times of the host's clock";
}

TEST(Cuda, MaterializedParametersHaveTheValuesOfTheCpu) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory device(compute), host;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto values = [&](const Memory& memory) {
      Parameter w{.name = "w", .shape = {3, 341}, .init = Init::normal(0.02f)};
      Parameter empty{.name = "empty", .shape = {0}, .trainable = false};
      materialize({&w, &empty}, memory, 7, dtype, dtype);
      EXPECT_EQ(w.value.device(), memory.device());
      EXPECT_FALSE(empty.grad.defined());
      const auto read = [](const Tensor& t) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(t.nbytes()));
        t.copy_to_host(bytes.data());
        return bytes;
      };
      EXPECT_EQ(read(w.grad), std::vector<std::byte>(static_cast<std::size_t>(w.grad.nbytes())));
      return read(w.value);
    };
    EXPECT_EQ(values(device), values(host)) << name_of(dtype);
  }
}

TEST(Cuda, InitialValuesHaveTheBitsOfTheCpu) {
  struct Range {
    std::int64_t begin, numel;
  };
  const Stream compute = Stream::cuda("compute", 0), cpu = Stream::inline_cpu("cpu");
  const Memory device(compute, {.poison = true}), host(cpu, {.poison = true});
  for (const Init& init : {Init::zeros(), Init::ones(), Init::normal(0.02f), Init::uniform(3)}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Range& r :
           std::vector<Range>{{0, 1}, {3, 1}, {1, 6}, {2, 3000}, {5'000'000'003, 101}, {4, 0}}) {
        const auto values = [&](const Stream& stream, const Memory& memory) {
          const Tensor x = Tensor::empty(memory, {r.numel + 8}, dtype, "x");
          launch_set(stream, x, 7, "set");
          launch_init(stream, init, x.slice(4, {r.numel}), r.begin, "w", 5);
          stream.synchronize();
          std::vector<std::byte> bytes(static_cast<std::size_t>(x.nbytes()));
          x.copy_to_host(bytes.data());
          return bytes;  // with what must stay
        };
        EXPECT_EQ(values(compute, device), values(cpu, host)) << init.str() << " " << r.begin;
      }
    }
  }
}

TEST(Cuda, ErrorsNameTheWorkTheStreamAndTheGpu) {
  const Stream compute = Stream::cuda("compute", 0);
  const std::string message = error_of<DeviceError>([&] {
    compute.launch({.name = "broken", .detail = "h.0"},
                   [] { fail<DeviceError>("[cuda] expected a kernel to start, got none"); });
  });
  for (const char* part : {"broken", "h.0", "compute", "cuda:0"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_THROW(Stream::cuda("compute", 9999), DeviceError);
}

TEST(Cuda, StreamStateIsMadeOnceAStream) {
  struct Counter {
    explicit Counter(const Stream& stream) : device(stream.device()) {}
    Device device;
    int uses = 0;
  };
  const Stream compute = Stream::cuda("compute", 0), other = compute.sibling("other");
  EXPECT_EQ(++compute.state<Counter>().uses, 1);
  EXPECT_EQ(++compute.state<Counter>().uses, 2);
  EXPECT_EQ(++other.state<Counter>().uses, 1);
  EXPECT_TRUE(compute.state<Counter>().device.is_cuda());
}

}  // namespace
}  // namespace tessera::engine
