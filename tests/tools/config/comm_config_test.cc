// Options of communication hooks: each reaches its field and the engine, and what would have no
// effect is refused.
#include "tools/config/comm_config.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tools/config/train_config.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::error_of;
using testing::has;

TrainConfig parsed(const std::vector<const char*>& arguments, bool validates = true) {
  TrainConfig c;
  c.train.lr = 1;
  c.out = "out";
  FlagSet flags("train", "");
  c.add_to(flags);
  std::ostringstream out;
  EXPECT_TRUE(flags.parse(arguments, out));
  if (validates) c.validate(flags);
  return c;
}

TEST(CommConfig, EveryFlagSetsItsOwnField) {
  const TrainConfig c = parsed(
      {"--comm.hook=bf16+powersgd", "--powersgd.rank=3", "--powersgd.start_step=4",
       "--powersgd.error_dtype=bf16", "--powersgd.offload_error", "--powersgd.warm_start=false",
       "--powersgd.min_compression_rate=1.5", "--powersgd.orthogonalize_eps=0.25",
       "--powersgd.seed=5", "--powersgd.across_replicas", "--parallel.strategy=hsdp"});
  const shard::HookOptions hook = c.comm.options();
  EXPECT_EQ(hook.kind, shard::HookKind::kPowerSgd);
  EXPECT_EQ(hook.wire, shard::Wire::kBF16);
  EXPECT_EQ(hook.powersgd.low_rank.rank, 3);
  EXPECT_EQ(hook.powersgd.low_rank.min_compression_rate, 1.5);
  EXPECT_EQ(hook.powersgd.start_step, 4);
  EXPECT_TRUE(hook.powersgd.error_feedback);
  EXPECT_EQ(hook.powersgd.error_dtype, DType::kBF16);
  EXPECT_TRUE(hook.powersgd.offload_error);
  EXPECT_FALSE(hook.powersgd.warm_start);
  EXPECT_EQ(hook.powersgd.orthogonalize_eps, 0.25);
  EXPECT_EQ(hook.powersgd.seed, 5u);
  EXPECT_TRUE(hook.powersgd.across_replicas);
  EXPECT_FALSE(parsed({"--comm.hook=powersgd", "--powersgd.error_feedback=false"})
                   .comm.powersgd.error_feedback);
}

TEST(CommConfig, ReachesTheEngine) {
  EXPECT_FALSE(parsed({}).fsdp_options(2).reducer);
  EXPECT_EQ(parsed({}).fsdp_options(2).reducer_text, "");
  for (const std::string& name : shard::hook_names()) {
    if (name == "none") continue;
    const std::string flag = "--comm.hook=" + name;
    const shard::FsdpOptions options = parsed({flag.c_str()}).fsdp_options(2);
    EXPECT_TRUE(options.reducer) << name;
    EXPECT_TRUE(options.reducer_text.starts_with(name)) << options.reducer_text;
  }
}

TEST(CommConfig, RefusesWhatContradictsItself) {
  const auto error_with = [](const std::vector<const char*>& arguments) {
    return error_of<engine::InvalidArgument>([&] { parsed(arguments); });
  };
  EXPECT_TRUE(has(error_with({"--powersgd.rank=2"}), {"powersgd.rank", "comm.hook=none"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=bf16", "--powersgd.seed=2"}),
                  {"powersgd.seed", "comm.hook=bf16"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=f16", "--precision.reduce=bf16"}),
                  {"precision.reduce", "bf16", "comm.hook=f16"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=powersgd", "--powersgd.across_replicas"}),
                  {"across_replicas", "parallel.strategy=zero3"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=powersgd", "--powersgd.error_feedback=false",
                              "--powersgd.offload_error"}),
                  {"offload_error", "error_feedback"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=powersgd", "--powersgd.error_feedback=false",
                              "--powersgd.error_dtype=bf16"}),
                  {"error_dtype", "error_feedback"}));
  for (const char* strategy : {"ddp", "hsdp", "hybrid_zero2"}) {
    const std::string flag = std::string("--parallel.strategy=") + strategy;
    EXPECT_TRUE(has(error_with({"--comm.hook=noop", flag.c_str()}), {"train.grad_clip", strategy}));
    parsed({"--comm.hook=noop", flag.c_str(), "--train.grad_clip=0"});
    EXPECT_TRUE(has(error_with({"--comm.hook=noop", flag.c_str(), "--train.grad_clip=0",
                                "--train.max_skips=2"}),
                    {"train.max_skips", strategy}));
  }
  parsed({"--comm.hook=noop", "--parallel.strategy=zero1"});
  parsed({"--comm.hook=noop", "--parallel.strategy=hfsdp"});
  EXPECT_TRUE(has(error_with({"--comm.hook=powersdg"}), {"powersdg", "batched_powersgd"}));
  EXPECT_TRUE(has(error_with({"--comm.hook=powersgd", "--powersgd.rank=0"}), {"powersgd.rank"}));
}

}  // namespace
}  // namespace tessera::tools
