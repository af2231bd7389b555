// A whole training run in process, as train_transformer makes it, and all that it leaves.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "tests/testing/temp_folder.h"
#include "tools/gpt.h"
#include "tools/gpt_checkpoint.h"
#include "tools/text_data.h"
#include "tools/trainer.h"

namespace tessera::testing {

struct GptRun {
  std::vector<double> loss, grad_norm;  ///< of each step, as logged
  std::map<std::string, std::vector<float>> parameters;
  std::string params_sha256;
};

/// `init_from`: folder of weights to start from; empty: the seed's.
inline GptRun run_gpt(tools::TrainConfig config, const tools::GptConfig& model,
                      const tools::TokenDataset& data, const std::string& init_from = "") {
  const TempFolder folder;
  config.out = folder.path();
  config.log.every = 0;
  tools::RunLog log(config, "tokens");
  GptRun run;
  comm::run_ranks(static_cast<int>(config.parallel.ranks), config.threads_options(),
                  [&](comm::ProcessGroup& world) {
                    tools::Gpt gpt(model);
                    tools::Trainer trainer(world, config, gpt.blocks(), gpt.root(),
                                           world.rank() == 0 ? &log : nullptr);
                    if (!init_from.empty()) tools::load_gpt(trainer.fsdp(), init_from);
                    const std::int64_t batch = config.train.batch;
                    const auto loss = [&](std::int64_t first) {
                      const auto tensor = [&](const char* name) {
                        return trainer.tape().empty({batch, model.seq}, engine::DType::kI32, name);
                      };
                      const engine::Tensor tokens = tensor("tokens"), targets = tensor("targets");
                      data.batch(first, batch, tokens.span<std::int32_t>(),
                                 targets.span<std::int32_t>());
                      return gpt.loss(trainer.tape(), tokens, targets,
                                      {.recompute = config.train.recompute,
                                       .seed = static_cast<std::uint64_t>(config.train.seed),
                                       .first_sample = first});
                    };
                    trainer.run(loss, nullptr, model.seq);
                    const std::string sha256 = trainer.params_sha256();
                    std::map<std::string, std::vector<float>> parameters;
                    for (const engine::Parameter* p : trainer.fsdp().parameters()) {
                      parameters[p->name] = trainer.fsdp().full_parameter(*p);
                    }
                    if (world.rank() == 0) {
                      run.params_sha256 = sha256;
                      run.parameters = std::move(parameters);
                    }
                  });
  std::istringstream lines(folder.read("log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line);
    run.loss.push_back(record.at("loss").get<double>());
    run.grad_norm.push_back(record.at("grad_norm").get<double>());
  }
  return run;
}

}  // namespace tessera::testing
