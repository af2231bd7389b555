// A training in C++ whose bits tests/python/tessera_test.py expects of the package: the parameters
// after each step, as bits of f32, for the strategy and the number of ranks that it is given.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "comm/threads.h"
#include "shard/optimizer/adamw.h"
#include "shard/raw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace shard = tessera::shard;
using shard::Raw;

namespace {

void train(comm::ProcessGroup& world, const char* strategy) {
  const engine::Memory memory;
  engine::Parameter w1{"first.w", {5, 3}}, b1{"first.b", {3}}, w2{"second.w", {3, 7}};
  engine::Block first{"first", {&w1, &b1}}, second{"second", {&w2}};
  const std::vector<engine::Block*> blocks = {&first, &second};
  const std::vector<engine::Parameter*> parameters = {&w1, &b1, &w2};
  shard::Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), blocks, nullptr,
                   {.placement = shard::Placement::preset(strategy)});
  for (const engine::Parameter* p : parameters) {
    std::vector<float> values(std::size_t(p->shape.numel()));
    for (int i = 0; i < int(values.size()); ++i) values[std::size_t(i)] = float(i * 5 % 11 - 5) / 8;
    fsdp.load(*p, values);
  }
  shard::AdamW optimizer(fsdp, {});
  Raw raw(fsdp);
  for (int step = 0; step < 4; ++step) {
    fsdp.begin_step();
    for (engine::Block* block : blocks) {
      raw.gather(*block, Raw::For::kForward);
      raw.release(*block);
    }
    for (int b = 1; b >= 0; --b) {
      engine::Block& block = *blocks[std::size_t(b)];
      raw.gather(block, Raw::For::kBackward);
      for (engine::Parameter* p : block.parameters) {
        float* grad = raw.grad(*p).dst.data<float>();
        for (int i = 0; i < int(p->shape.numel()); ++i)
          grad[i] = float((i * 7 + world.rank() * 3 + step * 5) % 17 - 8) / 16;
      }
      raw.grad_ready(block);
    }
    raw.step(optimizer, /*lr=*/0.01, /*max_norm=*/1);
    for (const engine::Parameter* p : parameters) {
      for (const float value : fsdp.full_parameter(*p)) {
        if (world.rank() == 0) std::printf("%a\n", double(value));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  comm::run_ranks(std::atoi(argv[2]), {},
                  [&](comm::ProcessGroup& world) { train(world, argv[1]); });
}
