// Averages of parameters on a GPU have the bits of the CPU's, wherever they lie.
#include <gtest/gtest.h>

#include <vector>

#include "comm/threads.h"
#include "engine/stream.h"
#include "shard/ema.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/toy_rank.h"

namespace tessera::shard {
namespace {

using engine::Stream;

// Values, averages and what is evaluated with them, after three steps.
std::vector<float> train(const FsdpOptions& options, bool on_gpu) {
  std::vector<float> all;
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    testing::ToyRank rank(
        world, options,
        {.compute = on_gpu ? Stream::cuda("compute", 0) : Stream::inline_cpu("compute")});
    AdamW optimizer(rank.fsdp, {});
    Ema ema(rank.fsdp);
    const auto add_averages = [&] {
      for (const engine::Parameter* p : rank.fsdp.parameters()) {
        const std::vector<float> average = ema.full_average(*p);
        all.insert(all.end(), average.begin(), average.end());
      }
    };
    add_averages();
    for (int step = 0; step < 3; ++step) {
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss(0.5f + static_cast<float>(step)));
      optimizer.step(0.01, rank.fsdp.finish_step(), 1);
      ema.update(step == 1 ? 0.25 : 0.9);
      ema.swap_in([&] { all.push_back(rank.evaluate()); });
      all.push_back(rank.evaluate());
      add_averages();
      const std::vector<float> values = rank.values();
      all.insert(all.end(), values.begin(), values.end());
    }
  });
  return all;
}

TEST(CudaEma, HasTheBitsOfTheCpu) {
  struct Case {
    engine::DType param;
    double on_host;
  };
  using engine::DType;
  for (const Case& c : {Case{DType::kF32, 0}, Case{DType::kF32, 1}, Case{DType::kBF16, 0.5}}) {
    FsdpOptions options{.placement = Placement::preset("zero3")};
    options.precision.param = c.param;
    options.offload.parameters = c.on_host;
    EXPECT_EQ(train(options, true), train(options, false)) << c.on_host;
  }
}

}  // namespace
}  // namespace tessera::shard
