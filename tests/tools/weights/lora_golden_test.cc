// Adapters train as PEFT trains them, on any ranks, are saved as it saves them, and merged as it
// merges them: see tests/golden/make_lora_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/token_dataset.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/models/family.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::Outcome;
using testing::run_program;

const std::string kRoot = "tests/golden/";

json golden() {
  return testing::parse_json(engine::read_text_file(kRoot + "lora/sgd.json", 1 << 20));
}

struct Case {
  std::string name;

  json run() const { return golden().at("runs").at(name); }
  std::string base() const { return kRoot + run().at("base").get<std::string>(); }
  std::string tokens() const { return kRoot + run().at("tokens").get<std::string>(); }
  std::string adapters() const { return kRoot + "lora/" + name; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> cases;
  const json all = golden();
  for (const auto& [name, run] : all.at("runs").items()) cases.push_back({name});
  return cases;
}

class LoraGolden : public ::testing::TestWithParam<Case> {
 protected:
  /// Trains the golden steps, and saves to NAME below the folder, as the log is.
  Outcome train(const std::string& name, std::int64_t ranks) const {
    const json training = golden().at("training");
    const auto text = [&](const char* key) { return training.at(key).dump(); };
    return run_program(
        "tools/programs/train_transformer",
        Flags{{"init.from", GetParam().base()},
              {"lora.from", GetParam().adapters()},
              {"save.final", folder_ / name},
              {"data.path", GetParam().tokens()},
              {"data.order", "sequential"},
              {"data.val_fraction", "0"},
              {"model.seq", text("seq")},
              {"train.batch", std::to_string(training.at("batch").get<std::int64_t>() / ranks)},
              {"train.steps", text("steps")},
              {"train.lr", text("lr")},
              {"train.momentum", text("momentum")},
              {"train.optimizer", "sgd"},
              {"train.schedule", "constant"},
              {"train.warmup", "0"},
              {"train.grad_clip", "0"},
              {"parallel.ranks", std::to_string(ranks)},
              {"device", "cpu"},
              {"sample.tokens", "0"},
              {"log.peak_ms", "0"},
              {"out", folder_ / (name + ".run")}});
  }
  /// Loss and norm of each step.
  std::vector<std::vector<double>> steps(const std::string& name) const {
    std::vector<std::vector<double>> steps;
    std::istringstream lines(folder_.read(name + ".run/log.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const json record = testing::parse_json(line);
      if (record.contains("loss")) steps.push_back({record.at("loss"), record.at("grad_norm")});
    }
    return steps;
  }
  /// Of the token after the first sequence.
  static std::vector<float> logits(const std::string& folder, const LoraDelta* delta) {
    const ModelConfig config = read_model_config(folder);
    std::vector<float> result;
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory;
      const auto compute = engine::Stream::inline_cpu("compute");
      engine::Tape tape(memory, compute);
      const auto model = config.make();
      shard::Fsdp fsdp(world, memory, compute, model->blocks(), model->root(), {});
      load_model(fsdp, *model, folder, delta);
      const TokenDataset data(TokenFile(GetParam().tokens()), {.seq = 12, .vocab = config.vocab});
      std::vector<std::int32_t> tokens(12), targets(12);
      data.batch(0, 1, tokens, targets);
      const auto got = engine::to_vector<float>(model->next_token_logits(
          tape, engine::Tensor::from<std::int32_t>(memory, {1, 12}, tokens)));
      if (world.rank() == 0) result = got;
    });
    return result;
  }
  static void expect_near(const std::vector<float>& got, const json& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i].get<double>(), 5e-5);
  }

  const testing::TempFolder folder_;
};

TEST_P(LoraGolden, TrainsAndMergesAsPeftDoes) {
  const json want = GetParam().run();
  for (const std::int64_t ranks : {1, 3}) {
    SCOPED_TRACE(ranks);
    const std::string name = "on" + std::to_string(ranks);
    const Outcome outcome = train(name, ranks);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const auto got = steps(name);
    ASSERT_EQ(got.size(), want.at("loss").size());
    for (std::size_t s = 0; s < got.size(); ++s) {
      const double loss = want.at("loss")[s], norm = want.at("grad_norm")[s];
      EXPECT_NEAR(got[s][0], loss, 1e-5 * loss) << s;
      EXPECT_NEAR(got[s][1], norm, 1e-4 * norm) << s;
    }
    const engine::SafetensorsFile file(folder_ / (name + "/adapter_model.safetensors"));
    EXPECT_EQ(file.tensors().size(), want.at("final").size());
    for (const engine::TensorInfo& tensor : file.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(engine::numel(tensor.shape)));
      file.read(tensor, 0, values);
      double squares = 0, product = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double value = values[i];
        squares += value * value;
        product += value * std::cos(static_cast<double>(i));
      }
      const json& final = want.at("final").at(tensor.name);
      const double norm = final[0];
      EXPECT_NEAR(std::sqrt(squares), norm, 1e-5 * norm) << tensor.name;
      EXPECT_NEAR(product, final[1].get<double>(), 1e-5 * norm) << tensor.name;
    }
  }
  // Merged while it is read, and in a folder.
  const std::string base = GetParam().base();
  const LoraDelta delta(folder_ / "on3", read_model_config(base));
  expect_near(logits(base, &delta), want.at("logits"));
  const Outcome merged = run_program(
      "tools/convert/convert",
      Flags{
          {"from", folder_ / "on3"}, {"base", base}, {"merge", "true"}, {"to", folder_ / "whole"}});
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  expect_near(logits(folder_ / "whole", nullptr), want.at("logits"));
}

TEST_P(LoraGolden, AreSavedAsTheyWereLoaded) {
  const ModelConfig base = read_model_config(GetParam().base());
  ModelConfig config = base;
  config.lora = read_lora(GetParam().adapters(), base);
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    const auto model = config.make();
    shard::Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model->blocks(),
                     model->root(), {});
    load_adapters(fsdp, *model, GetParam().adapters());
    save_adapters(fsdp, *model, config.lora, folder_.path(), GetParam().base(), world);
  });
  const AdapterConfig before = read_adapter_config(GetParam().adapters()),
                      after = read_adapter_config(folder_.path());
  EXPECT_EQ(after.base, before.base);
  EXPECT_EQ(after.r, before.r);
  EXPECT_EQ(after.lora_alpha, before.lora_alpha);
  EXPECT_EQ(after.use_rslora, before.use_rslora);
  EXPECT_EQ(after.fan_in_fan_out, before.fan_in_fan_out);
  EXPECT_EQ(read_lora(folder_.path(), base).targets, config.lora.targets);
  const engine::SafetensorsFile old_file(GetParam().adapters() + "/adapter_model.safetensors"),
      new_file(folder_ / "adapter_model.safetensors");
  EXPECT_EQ(new_file.tensors().size(), old_file.tensors().size());
  for (const engine::TensorInfo& tensor : old_file.tensors()) {
    const engine::TensorInfo* saved = new_file.find(tensor.name);
    ASSERT_NE(saved, nullptr) << tensor.name;
    EXPECT_EQ(saved->shape, tensor.shape) << tensor.name;
    std::vector<float> old_values(std::size_t(engine::numel(tensor.shape))),
        new_values(old_values.size());
    old_file.read(tensor, 0, old_values);
    new_file.read(*saved, 0, new_values);
    EXPECT_EQ(new_values, old_values) << tensor.name;
  }
  // What checkpoints say of the model makes it again.
  EXPECT_EQ(to_text(parse_model_text(to_text(config), "text")), to_text(config));
}

INSTANTIATE_TEST_SUITE_P(Cases, LoraGolden, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tessera::tools
