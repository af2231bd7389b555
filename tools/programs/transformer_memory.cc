#include "tools/programs/transformer_memory.h"

#include "tools/planning/task_plan.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {

MemoryShortage transformer_shortage(const TransformerConfig& asked, const TrainConfig& config,
                                    LanguageModel& model, const Ranks& ranks) {
  if (ranks.num_gpus > 0 || ranks.size > ParallelConfig().max_ranks) return {};
  const HostMemory memory = host_memory(
      ranks.local.on_host(), /*on_gpus=*/false,
      [&](int rank) {
        return rank_kind(without_budget(config), plan_target(ranks, config, rank), model);
      },
      [&](int rank) {
        return plan_transformer(asked, config, model, plan_target(ranks, config, rank));
      });
  return memory_shortage(memory, config, ranks);
}

}  // namespace tessera::tools
