// Two models with an Fsdp and an optimizer each, in one checkpoint: one learns a curve from points
// that are not exact, the other how far off the first is at each place. A second run loads both on
// more ranks, with another strategy, and ends with the bits of the first.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "mlp.h"
#include "ops/elementwise/cast.h"
#include "ops/elementwise/sub.h"
#include "ops/losses/losses.h"
#include "ops/mul.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr int kBatches = 4, kSteps = 300;  // batches of a step, on all ranks together

struct Learner {
  Learner(comm::ProcessGroup& world, Tape& tape, const char* name, shard::FsdpOptions options)
      : model(name, {1, 32, 1}),
        fsdp(world, tape.memory(), tape.stream(), model.blocks(), nullptr, options) {}
  Mlp model;
  shard::Fsdp fsdp;
  shard::AdamW adam{fsdp, {.weight_decay = 0}};
};

// Of both models, for points that are less exact right of 0 than left of it.
std::vector<Tensor> losses(Tape& tape, Mlp& curve, Mlp& error, std::int64_t batch) {
  const engine::RandomStream random{static_cast<std::uint64_t>(batch)};
  const Tensor x = tape.empty({64, 1}, engine::DType::kF32, "x");
  const Tensor y = tape.empty(x.shape(), x.dtype(), "y");
  for (std::size_t i = 0; i < 64; ++i) {
    const float at = x.span<float>()[i] = 4 * random.uniform(i) - 2;
    y.span<float>()[i] = std::sin(2 * at) + (at < 0 ? 0.1f : 0.5f) * random.normal(64 + i);
  }
  const Tensor guess = curve(tape, x), off = ops::stop_gradient(tape, ops::sub(tape, guess, y));
  return {ops::mse(tape, guess, y), ops::mse(tape, error(tape, x), ops::mul(tape, off, off))};
}

// Returns the errors, squared, that are expected at -1 and at 1, and the parameters of both models.
std::vector<float> train(comm::ProcessGroup& world, const std::string& folder, bool resumes) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const shard::FsdpOptions how{.placement = shard::Placement::preset(resumes ? "ddp" : "zero3")};
  Learner curve(world, tape, "curve", how), error(world, tape, "error", how);
  Learner* const both[] = {&curve, &error};
  shard::Checkpointer checkpoints(world, {{&curve.fsdp, &curve.adam}, {&error.fsdp, &error.adam}},
                                  {.folder = folder});
  const auto loaded = checkpoints.load_newest();
  engine::require(loaded.has_value() == resumes, "[checkpoint] expected one: {}", resumes);
  for (std::int64_t step = loaded ? loaded->step : 0; step < kSteps; ++step) {
    // On 2 ranks, as on 4, gradients are added in the order of batches. So the bits are equal.
    for (auto* l : both) l->fsdp.begin_step(kBatches / world.size());
    for (int batch = world.rank(); batch < kBatches; batch += world.size()) {
      for (auto* l : both)
        if (batch >= world.size()) l->fsdp.next_micro_step();
      tape.backward(losses(tape, curve.model, error.model, step * kBatches + batch));
    }
    for (auto* l : both) l->adam.step(/*lr=*/1e-2, l->fsdp.finish_step(), /*max_norm=*/1);
    if (step + 1 == kSteps / 2) checkpoints.save(step + 1, {});  // written during the next steps
    checkpoints.poll();
  }
  checkpoints.wait();
  const Tensor x = Tensor::from<float>(memory, {2, 1}, std::vector<float>{-1, 1}, "x");
  auto values = engine::to_vector<float>(tape.no_grad([&] { return error.model(tape, x); }));
  for (auto* l : both)
    for (const auto* p : l->fsdp.parameters())
      for (const float value : l->fsdp.full_parameter(*p)) values.push_back(value);
  return values;
}

int main() {
  std::string folder = std::filesystem::temp_directory_path() / "two_models-XXXXXX";
  engine::require<engine::IoError>(mkdtemp(folder.data()) != nullptr, "[mkdtemp] {}", folder);
  bool ok = false;
  try {
    std::vector<std::vector<float>> a(2), b(4);  // of each rank
    comm::run_ranks(2, {}, [&](auto& world) { a[world.rank()] = train(world, folder, false); });
    comm::run_ranks(4, {}, [&](auto& world) { b[world.rank()] = train(world, folder, true); });
    std::printf("errors that are expected: %.3f and %.3f\n", a[0][0], a[0][1]);
    ok = a[0] == b[0] && a[0][0] < 0.1f && a[0][1] > 0.15f;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
  std::filesystem::remove_all(folder);
  return ok ? 0 : 1;
}
