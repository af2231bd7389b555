#include "tools/generate/memory_need.h"

#include <cstddef>

#include "comm/meta.h"
#include "engine/memory.h"
#include "engine/meta.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {

std::int64_t generating_nbytes(const ModelConfig& config, int num_ranks, std::int64_t num_tokens) {
  using engine::Category;
  std::int64_t nbytes = 0;
  // The first rank owns as much as any other.
  const auto world = comm::make_meta_rank(0, num_ranks);
  const auto compute = engine::Stream::meta("compute", engine::DeviceKind::kCpu, {}, {});
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  const auto model = config.make();
  shard::Fsdp fsdp(*world, memory, compute, model->blocks(), model->root(),
                   {.placement = shard::Placement::preset("zero3")});
  const engine::Tensor tokens =
      engine::Tensor::empty(memory, {1, num_tokens}, engine::DType::kI32, "tokens");
  fsdp.keep_gathered([&] {
    KeyValueCache cache(num_tokens);
    static_cast<void>(model->next_token_logits(tape, tokens, cache));
    // Gradients have addresses, and take no memory before something is written to them.
    for (const Category c :
         {Category::kParameterShard, Category::kGatheredParameter, Category::kActivation}) {
      nbytes += memory.stats().peak_nbytes[static_cast<std::size_t>(c)];
    }
  });
  return num_ranks * nbytes;
}

}  // namespace tessera::tools
