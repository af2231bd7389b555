// How long it takes to plan a training that this machine could not hold.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/bench/parts.h"
#include "tools/models/family.h"
#include "tools/planning/planner.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

void bench_plan(const BenchConfig& config, BenchReport& report) {
  report.begin_table("plan",
                     fmt::format("make_plan() of two steps, zero3 on 8 ranks, bf16, batch 1; {} "
                                 "samples. peak: of a rank, as planned",
                                 config.samples),
                     {"model", "ms", "min_ms", "max_ms", "launches", "peak_gib"});
  for (const std::string& preset : {measured_presets().front(), measured_presets().back()}) {
    if (!config.wants("plan " + preset)) continue;
    TrainConfig training;
    training.parallel.ranks = 8;
    training.train.batch = 1;
    training.train.steps = 2;
    training.precision.param = engine::DType::kBF16;
    const ModelConfig sizes = preset_config(preset);
    const engine::Shape shape{1, sizes.seq};
    std::vector<double> ms;
    TrainPlan plan{};
    for (std::int64_t sample = 0; sample < config.samples; ++sample) {
      const Timer timer;
      const std::unique_ptr<LanguageModel> model = sizes.make();
      plan = make_plan(
          training, {.num_ranks = 8}, *model,
          {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}});
      ms.push_back(timer.ms());
    }
    const Measurement t = Measurement::of(ms);
    report.row({preset, t.median_ms, t.min_ms, t.max_ms, plan.num_launches,
                static_cast<double>(peak_nbytes(plan)) / 0x1p30});
  }
}

}  // namespace tessera::tools
