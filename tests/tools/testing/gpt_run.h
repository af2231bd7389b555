// A whole training run in process, as train_transformer makes it, and all that it leaves.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/tape.h"
#include "tests/shard/collective_log.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/token_dataset.h"
#include "tools/launch/ranks.h"
#include "tools/models/gpt.h"
#include "tools/probe/probe.h"
#include "tools/report/step_record.h"
#include "tools/train/trainer.h"
#include "tools/weights/model_files.h"

namespace tessera::testing {

struct GptRun {
  std::vector<double> loss, grad_norm;  ///< of each step, as logged; NaN: not finite
  std::map<std::string, std::vector<float>> parameters;
  std::string params_sha256;
  std::vector<nlohmann::json> records;                ///< of each step, as logged
  std::vector<std::vector<tools::StepRecord>> steps;  ///< of each rank, by rank
};

/// Of a rank; null: none.
using ProbeFactory = std::function<std::unique_ptr<tools::Probe>(int rank)>;

using LossChange =
    std::function<engine::Tensor(engine::Tape&, const engine::Tensor& loss, std::int64_t first)>;

/// Of a model of any family, with sequences of `seq`. `init_from`: folder of weights to start from;
/// empty: the seed's. `calls`: what rank 0 called. `change`: makes another loss of that of the
/// batch that begins with sample `first`.
inline GptRun run_model(tools::TrainConfig config,
                        const std::function<std::unique_ptr<tools::LanguageModel>()>& make,
                        std::int64_t seq, const tools::TokenDataset& data,
                        const std::string& init_from = "", CollectiveLog* calls = nullptr,
                        const ProbeFactory& make_probe = {}, const LossChange& change = {}) {
  const TempFolder folder;
  config.out = folder.path();
  config.log.every = 0;
  tools::RunLog log(config, "tokens");
  GptRun run;
  const tools::Ranks ranks = tools::Ranks::choose(config);
  run.steps.resize(static_cast<std::size_t>(ranks.size));
  ranks.run(config, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    CollectiveLog unread;
    LoggedGroup logged(world, is_first && calls != nullptr ? *calls : unread);
    const std::unique_ptr<tools::LanguageModel> model = make();
    const auto probe = make_probe ? make_probe(world.rank()) : nullptr;
    tools::Trainer trainer(logged, ranks.compute(world.rank()), config, model->blocks(),
                           model->root(), is_first ? &log : nullptr, {.probe = probe.get()});
    trainer.on_step([&run, rank = static_cast<std::size_t>(world.rank())](
                        const tools::StepRecord& step) { run.steps[rank].push_back(step); });
    if (!init_from.empty()) tools::load_model(trainer.fsdp(), *model, init_from);
    const engine::Shape shape{config.train.batch, seq};
    std::vector<tools::BatchTensor> tensors = {{"tokens", shape, engine::DType::kI32},
                                               {"targets", shape, engine::DType::kI32}};
    if (data.packs()) tensors.push_back({"positions", shape, engine::DType::kI32});
    const auto fill = [&](std::int64_t first, const tools::Batch& host) {
      data.batch(first, config.train.batch, host[0].span<std::int32_t>(),
                 host[1].span<std::int32_t>(),
                 data.packs() ? host[2].span<std::int32_t>() : std::span<std::int32_t>());
    };
    const auto loss = [&](std::int64_t first, const tools::Batch& batch) {
      const engine::Tensor value =
          model->loss(trainer.tape(), batch,
                      {.recompute = config.train.recompute,
                       .seed = static_cast<std::uint64_t>(config.train.seed),
                       .first_sample = first,
                       .samples_before = trainer.samples_before(),
                       .is_sum = config.train.sums_losses()});
      return change ? change(trainer.tape(), value, first) : value;
    };
    const auto num_targets = [&](std::int64_t first) {
      return data.num_targets(first, config.train.batch);
    };
    trainer.run({.tensors = tensors, .fill = fill, .num_targets = num_targets}, loss, nullptr, seq);
    const std::string sha256 = trainer.params_sha256();
    std::map<std::string, std::vector<float>> parameters;
    for (const engine::Parameter* p : trainer.fsdp().parameters()) {
      parameters[p->name] = trainer.fsdp().full_parameter(*p);
    }
    if (is_first) {
      run.params_sha256 = sha256;
      run.parameters = std::move(parameters);
    }
  });
  log.flush();
  std::istringstream lines(folder.read("log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto record = parse_json(line);
    for (const auto& [name, values] :
         {std::pair{"loss", &run.loss}, {"grad_norm", &run.grad_norm}}) {
      const auto& value = record.at(name);  // null: not finite
      values->push_back(value.is_null() ? NAN : value.get<double>());
    }
    run.records.push_back(record);
  }
  return run;
}

inline GptRun run_gpt(const tools::TrainConfig& config, const tools::GptConfig& model,
                      const tools::TokenDataset& data, const std::string& init_from = "",
                      CollectiveLog* calls = nullptr, const ProbeFactory& make_probe = {},
                      const LossChange& change = {}) {
  return run_model(
      config, [&] { return std::make_unique<tools::Gpt>(model); }, model.seq, data, init_from,
      calls, make_probe, change);
}

}  // namespace tessera::testing
