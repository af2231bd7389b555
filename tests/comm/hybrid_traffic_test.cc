// As many bytes cross between processes as plans say.
#include "comm/hybrid/traffic.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/memory_transport.h"
#include "tests/comm/message_job.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;

// Counts what it sends.
class Counting final : public Transport {
 public:
  Counting(std::unique_ptr<Transport> to, std::atomic<std::int64_t>& nbytes)
      : to_(std::move(to)), nbytes_(nbytes) {}

  std::string str() const override { return to_->str(); }
  int process() const override { return to_->process(); }
  int num_processes() const override { return to_->num_processes(); }
  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    nbytes_ += std::ssize(bytes);
    return to_->send(process, tag, bytes, std::move(owner));
  }
  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    return to_->receive(process, tag, bytes, std::move(owner));
  }

 private:
  const std::unique_ptr<Transport> to_;
  std::atomic<std::int64_t>& nbytes_;
};

using Call = std::function<void(ProcessGroup&, const Stream&)>;

std::int64_t bytes_of(const std::vector<int>& num_ranks, const Call& call) {
  std::atomic<std::int64_t> nbytes = 0;
  std::vector<std::unique_ptr<Transport>> transports;
  for (auto& end : MemoryTransport::make(static_cast<int>(num_ranks.size()))) {
    transports.push_back(std::make_unique<Counting>(std::move(end), nbytes));
  }
  MessageJob(std::move(transports), num_ranks, std::chrono::seconds(30))
      .run([&](ProcessGroup& group) {
        const Stream stream = Stream::inline_cpu("comm");
        call(group, stream);
      });
  return nbytes;
}

TEST(HybridTraffic, IsWhatProcessesSend) {
  constexpr std::int64_t kNumel = 30'000;  // more than goes along with fingerprints
  for (const std::vector<int>& num_ranks :
       {std::vector{1, 1, 1}, std::vector{2, 2}, std::vector{1, 3, 2}, std::vector{3}}) {
    SCOPED_TRACE(::testing::PrintToString(num_ranks));
    const std::int64_t ranks = std::reduce(num_ranks.begin(), num_ranks.end());
    const std::int64_t fingerprints =
        bytes_of(num_ranks, [](ProcessGroup& group, const Stream&) { group.barrier("none"); });
    const auto expect = [&](const std::string& name, const Collective& c, const Call& call) {
      EXPECT_EQ(bytes_of(num_ranks, call) - fingerprints, bytes_between_processes(c, num_ranks))
          << name;
    };
    const Memory memory;
    const auto tensor = [&](std::int64_t numel, DType dtype) {
      return Tensor::zeros(memory, {numel}, dtype, "x");
    };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(dtype == DType::kF32 ? "f32" : "bf16");
      const auto block = [&] { return tensor(kNumel, dtype); };
      const auto whole = [&] { return tensor(ranks * kNumel, dtype); };
      using Op = Collective::Op;
      expect("all_gather", {.op = Op::kAllGather, .in = block(), .out = whole(), .work = {}},
             [&](ProcessGroup& g, const Stream& s) { g.all_gather(block(), whole(), s, "x"); });
      expect("broadcast", {.op = Op::kBroadcast, .in = block(), .out = block(), .work = {}},
             [&](ProcessGroup& g, const Stream& s) { g.broadcast(block(), 0, s, "x"); });
      expect("all_to_all", {.op = Op::kAllToAll, .in = whole(), .out = whole(), .work = {}},
             [&](ProcessGroup& g, const Stream& s) { g.all_to_all(whole(), whole(), s, "x"); });
      for (const Accumulate adds : {Accumulate::kNo, Accumulate::kYes}) {
        expect("reduce_scatter",
               {.op = Op::kReduceScatter,
                .in = whole(),
                .out = tensor(kNumel, DType::kF32),
                .accumulate = adds,
                .work = {}},
               [&](ProcessGroup& g, const Stream& s) {
                 g.reduce_scatter(whole(), tensor(kNumel, DType::kF32), adds, s, "x");
               });
        expect("all_reduce",
               {.op = Op::kAllReduce,
                .in = block(),
                .out = tensor(kNumel, DType::kF32),
                .accumulate = adds,
                .work = {}},
               [&](ProcessGroup& g, const Stream& s) {
                 g.all_reduce(block(), tensor(kNumel, DType::kF32), adds, s, "x");
               });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm
