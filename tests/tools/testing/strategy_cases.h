// Trainings of every strategy, each with options that meet it.
#pragma once

#include <string>
#include <vector>

#include "tests/testing/program.h"

namespace tessera::testing {

struct StrategyCase {
  std::string strategy;
  Flags options;
};

inline std::vector<StrategyCase> strategy_cases() {
  return {
      {"ddp",
       {{"comm.hook", "powersgd"},
        {"powersgd.start_step", "1"},
        {"powersgd.min_compression_rate", "1"},
        {"parallel.bucket_mb", "0.001"},
        {"model.dim", "16"}}},
      {"zero1",
       {{"train.accum", "2"},
        {"train.grad_clip", "0"},
        {"train.overlap_optimizer", "interleaved"}}},
      {"zero2", {{"train.accum", "2"}, {"train.accum_comm", "last"}, {"train.grad_clip", "0.1"}}},
      {"shard_grad_op", {{"model.dropout", "0.2"}, {"parallel.prefetch", "2"}}},
      {"zero3",
       {{"offload.parameters", "1"},
        {"offload.gradients", "1"},
        {"offload.optimizer", "1"},
        {"train.recompute", "true"},
        {"parallel.prefetch", "0"}}},
      {"hsdp", {{"precision.param", "bf16"}, {"precision.reduce", "bf16"}, {"train.accum", "2"}}},
      {"hybrid_zero2", {{"comm.hook", "bf16"}, {"train.overlap_optimizer", "none"}}},
      {"hfsdp",
       {{"comm.hook", "batched_powersgd"},
        {"powersgd.start_step", "1"},
        {"train.overlap_optimizer", "backward"},
        {"train.grad_clip", "0"}}},
  };
}

}  // namespace tessera::testing
