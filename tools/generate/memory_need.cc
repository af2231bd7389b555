#include "tools/generate/memory_need.h"

#include <cstddef>
#include <vector>

#include "comm/meta.h"
#include "engine/memory.h"
#include "engine/meta.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {

std::int64_t generating_nbytes(const ModelConfig& config, const GeneratingNeed& need) {
  using engine::Category;
  std::int64_t nbytes = 0;
  // The first rank owns as much as any other.
  const auto world = comm::make_meta_rank(0, need.num_ranks);
  const auto compute = engine::Stream::meta("compute", engine::DeviceKind::kCpu, {}, {});
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  const auto model = config.make();
  shard::Fsdp fsdp(
      *world, memory, compute, model->blocks(), model->root(),
      {.placement = shard::Placement::preset("zero3"), .precision = {.param = need.param}});
  const engine::Tensor tokens =
      engine::Tensor::empty(memory, {1, need.num_tokens}, engine::DType::kI32, "tokens");
  fsdp.keep_gathered([&] {
    std::vector<KeyValueCache> caches(static_cast<std::size_t>(need.num_texts),
                                      KeyValueCache(need.num_kept));
    for (KeyValueCache& cache : caches)
      static_cast<void>(model->next_token_logits(tape, tokens, cache));
    // Gradients have addresses, and take no memory before something is written to them.
    for (const Category c :
         {Category::kParameterShard, Category::kGatheredParameter, Category::kActivation}) {
      nbytes += memory.stats().peak_nbytes[static_cast<std::size_t>(c)];
    }
  });
  return need.num_ranks * nbytes;
}

}  // namespace tessera::tools
