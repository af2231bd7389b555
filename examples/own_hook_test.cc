// Trains with the hook of top_k.h and goes on from a checkpoint: on as many ranks with the bits of
// a run that was not interrupted, on others with what all ranks owe together; and what others
// cannot go on with is refused by name.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/linear.h"
#include "ops/mul.h"
#include "ops/sum.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "top_k.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;

struct Result {
  std::vector<float> weight, owed;  // by all ranks together
  friend bool operator==(const Result&, const Result&) = default;
};

// Goes on from the newest checkpoint of `folder`, if there is one, until `steps`, and saves.
Result train(const std::string& folder, int ranks, int steps, int select_every) {
  Result result;
  std::vector<std::vector<shard::HookTensor>> states(static_cast<std::size_t>(ranks));
  comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    engine::Parameter weight{"fc.weight", {8, 8}, engine::Init::normal(0.3f)};
    engine::Block block{"fc", {&weight}};
    const auto hook = [=](const shard::ReducerContext& context) {
      return std::make_unique<TopK>(context, /*k=*/4, select_every);
    };
    shard::Fsdp fsdp(world, memory, tape.stream(), {&block}, /*root=*/nullptr,
                     {.reducer = hook, .reducer_text = "top 4"});
    shard::Sgd optimizer(fsdp, {});
    shard::Checkpointer checkpoints(world, {{&fsdp, &optimizer}}, {.folder = folder});
    const auto loaded = checkpoints.load_newest();
    std::int64_t step = loaded ? loaded->step : 0;
    const bool trains = step < steps;
    for (; step < steps; ++step) {
      std::vector<float> values(32);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = 0.1f * float((i * 7 + std::size_t(3 * step + world.rank())) % 11);
      }
      const auto x = engine::Tensor::from<float>(memory, {4, 8}, values, "x");
      fsdp.begin_step();
      tape.backward(tape.region(block, [&] {
        const auto y = ops::linear(tape, x, weight, /*bias=*/nullptr);
        return ops::sum(tape, ops::mul(tape, y, y));
      }));
      optimizer.step(/*lr=*/1e-3, fsdp.finish_step(), /*max_norm=*/0);
    }
    if (trains) checkpoints.save(steps, {});
    checkpoints.wait();
    const auto whole = fsdp.full_parameter(weight);
    if (world.rank() == 0) result.weight = whole;
    states[static_cast<std::size_t>(world.rank())] = save_hooks(fsdp);
  });
  result.owed.resize(64);
  for (const auto& state : states) {
    for (std::size_t i = 0; i < 64; ++i) result.owed[i] += state[0].values[i];
  }
  return result;
}

int main() {
  const char* const tmp = std::getenv("TEST_TMPDIR");
  const std::filesystem::path all = std::string(tmp == nullptr ? "." : tmp) + "/own_hook";
  std::filesystem::remove_all(all);
  const Result whole = train(all / "whole", 2, 6, 1), kept = train(all / "errors", 2, 3, 1);
  bool ok = whole.owed != std::vector<float>(64, 0);
  for (const int ranks : {1, 3, 4}) ok = ok && train(all / "errors", ranks, 3, 1) == kept;
  ok = ok && train(all / "errors", 2, 6, 1) == whole;
  std::printf("%s: 1, 3 and 4 ranks owe what 2 ranks owed\n", ok ? "ok" : "FAILED");
  train(all / "thresholds", 2, 3, 2);
  try {
    train(all / "thresholds", 3, 6, 2);
    ok = false;
  } catch (const engine::InvalidArgument& e) {
    std::printf("%s\n", e.what());
    const std::string expected = "[topk] expected topk.threshold of 3 ranks";
    ok = ok && std::string(e.what()).find(expected) != std::string::npos;
  }
  ok = ok && train(all / "thresholds", 2, 6, 2) == train(all / "uninterrupted", 2, 6, 2);
  std::filesystem::remove_all(all);
  return ok ? 0 : 1;
}
