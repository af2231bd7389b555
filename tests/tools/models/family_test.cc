// What programs ask of a family of models, asked of the bundled one and of another that only this
// test knows: nothing else needs to be told of it.
#include "tools/models/family.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/io/safetensors.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_family.h"
#include "tools/cli/flags.h"
#include "tools/programs/transformer_config.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

const Families& both() { return testing::families_and_tiny(); }

TEST(Families, TellTheirPresetsAndTitles) {
  EXPECT_EQ(titles(), "GPT-2 or Llama or Mistral or Qwen2 or Qwen3 or GPT-NeoX");
  EXPECT_EQ(titles(both()), titles() + " or Tiny");
  EXPECT_EQ(
      preset_names(both()),
      (std::vector<std::string>{
          "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "smollm2-135m", "tinyllama-1.1b",
          "llama3.2-1b", "llama3-8b", "llama3-70b", "qwen2.5-0.5b", "qwen3-0.6b", "pythia-70m",
          "pythia-160m", "pythia-410m", "pythia-1.4b", "pythia-6.9b", "tiny"}));
  EXPECT_EQ(preset_config("tiny", both()).family, both().back());
  EXPECT_EQ(preset_config("gpt2", both()).family, both()[0]);
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { preset_config("tiny"); }), {"gpt2-xl", "'tiny'"}));
}

TEST(Families, CountParametersAndOperations) {
  const ModelConfig tiny = preset_config("tiny", both());
  EXPECT_EQ(tiny.num_parameters(), 2 * 256 * 8 + 2 * (12 * 8 + 8 * 12));
  EXPECT_EQ(tiny.train_flops(3), 6 * 3 * (2 * 2 * 8 * 12 + 256 * 8));
}

TEST(Families, TextOfACheckpointIsReadBack) {
  EXPECT_EQ(to_text(preset_config("small")),
            R"({"model":"gpt2","layers":3,"heads":4,"dim":128,"seq":64,"vocab":256,)"
            R"("norm_eps":1e-05})");
  ModelConfig tiny = preset_config("tiny", both());
  tiny.numbers["scale"] = 0.75;
  tiny.layers = 3;
  const std::string text = to_text(tiny);
  EXPECT_EQ(text, R"({"model":"tiny","layers":3,"heads":1,"dim":8,"seq":4,"vocab":256,"hidden":12,)"
                  R"("scale":0.75})");
  const ModelConfig back = parse_model_text(text, "here", both());
  EXPECT_EQ(back.family, tiny.family);
  EXPECT_EQ(to_text(back), text);
  for (const auto& [from, to, what] :
       {std::tuple{"\"tiny\"", "\"huge\"", "a model of train_transformer"},
        std::tuple{"\"dim\"", "\"width\"", "a number as dim"},
        std::tuple{"\"dim\":8", "\"dim\":8.5", "a number as dim"},
        std::tuple{"\"hidden\":12", "\"hidden\":12.5", "a number as hidden"},
        std::tuple{"\"scale\":0.75", "\"scale\":\"0.75\"", "a number as scale"}}) {
    std::string other = text;
    other.replace(other.find(from), std::string(from).size(), to);
    EXPECT_TRUE(
        has(error_of<IoError>([&] { parse_model_text(other, "here", both()); }), {what, "(here)"}))
        << other;
  }
}

TEST(Families, AFolderSaysWhoseItIs) {
  const TempFolder folder;
  ModelConfig tiny = preset_config("tiny", both());
  tiny.numbers["hidden"] = 10;
  folder.write("config.json", tiny.make()->config_text());
  EXPECT_EQ(to_text(read_model_config(folder.path(), both())), to_text(tiny));
  EXPECT_TRUE(has(
      error_of<IoError>([&] { read_model_config(folder.path()); }),
      {R"(model_type to be "gpt2" or "llama" or)", R"("gpt_neox", got "tiny")", "config.json"}));
  folder.write("config.json", R"({"model_type":"gptj"})");
  EXPECT_TRUE(has(error_of<IoError>([&] { read_model_config(folder.path(), both()); }),
                  {R"("gpt_neox" or "tiny", got "gptj")"}));
  folder.write("config.json", preset_config("gpt2").make()->config_text());
  EXPECT_EQ(to_text(read_model_config(folder.path(), both())), to_text(preset_config("gpt2")));
}

TransformerConfig parsed(const std::vector<const char*>& arguments, std::ostream& out) {
  TransformerConfig config(both());
  FlagSet flags("trainer", "");
  config.add_to(flags);
  flags.parse(arguments, out);
  return config;
}

TEST(Families, OptionsOfAFamilyAreForItsModels) {
  std::ostringstream out;
  const ModelConfig config =
      parsed({"--model.preset=tiny", "--model.hidden=6", "--model.dim=4"}, out).model_config();
  EXPECT_EQ(config.numbers.at("hidden"), 6);
  EXPECT_EQ(config.dim, 4);
  EXPECT_EQ(config.layers, 2);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { parsed({"--model.hidden=6"}, out).model_config(); }),
          {"model.hidden of a model that has it", "GPT-2"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    parsed({"--model.preset=tiny", "--model.dropout=0.5"}, out).model_config();
                  }),
                  {"[tiny] expected no model.dropout"}));
  EXPECT_EQ(out.str(), "");
  parsed({"--help"}, out);
  EXPECT_TRUE(has(out.str(), {"width between the products of a layer", "GPT-NeoX or Tiny model"}));
  EXPECT_EQ(out.str().find("model.scale"), std::string::npos);
}

TEST(Families, AnotherFamilyIsPlanned) {
  TransformerConfig config(both());
  config.model.preset = "tiny";
  config.train.batch = 2;
  config.parallel.strategy = "zero3";
  const auto model = config.model_config().make();
  const PlanRow row = plan_row("tiny", config, *model, {.num_ranks = 4});
  EXPECT_EQ(row.tokens, 4 * 2 * 4);
  EXPECT_EQ(row.flops, 2 * model->train_flops(4));
  EXPECT_EQ(row.plan.collectives.front().label, "layer.1 forward");
}

testing::Outcome train(testing::Flags flags) {
  flags.insert({{"device", "cpu"},
                {"log.peak_ms", "0"},
                {"parallel.ranks", "2"},
                {"train.steps", "2"},
                {"train.batch", "1"}});
  return testing::run_program("tests/tools/models/tiny_trainer", flags);
}

// Saved by one training, and the start of another that makes no step.
TEST(Families, AnotherFamilyIsTrainedSampledSavedAndLoaded) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 200; ++i) text += "ab c"[i % 4];
  const std::string data = folder.write("text.txt", text);
  const testing::Outcome first = train({{"data.path", data},
                                        {"model.preset", "tiny"},
                                        {"sample.tokens", "3"},
                                        {"out", folder / "a"},
                                        {"save.final", folder / "model"}});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_TRUE(has(first.out, {"model: 2 layers x 8, 1 heads", "model in "}));
  const engine::SafetensorsFile file(folder / "model/model.safetensors");
  std::vector<std::string> names;
  for (const engine::TensorInfo& tensor : file.tensors()) names.push_back(tensor.name);
  std::ranges::sort(names);
  EXPECT_EQ(names, (std::vector<std::string>{"head.weight", "model.embed.weight",
                                             "model.layer.0.down", "model.layer.0.up.first",
                                             "model.layer.0.up.rest", "model.layer.1.down",
                                             "model.layer.1.up.first", "model.layer.1.up.rest"}));
  std::vector<float> up(8), next(8);  // its first row, and its second
  file.read(*file.find("model.layer.0.up.first"), 0, up);
  file.read(*file.find("model.layer.0.up.rest"), 0, next);
  EXPECT_NE(up, next);
  const testing::Outcome second = train({{"data.path", data},
                                         {"init.from", folder / "model"},
                                         {"train.steps", "0"},
                                         {"sample.tokens", "0"},
                                         {"out", folder / "b"},
                                         {"save.final", folder / "copy"}});
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(folder.read("copy/model.safetensors"), folder.read("model/model.safetensors"));
  // A save that was cut short left no config.json, or that of another model.
  const std::string config = folder.read("copy/config.json");
  std::filesystem::remove(folder / "copy/config.json");
  EXPECT_EQ(read_model_config(folder / "copy", both()).layers, 2);
  std::string other = config;
  other.replace(other.find("\"width\":"), 8, "\"width\":1");
  folder.write("copy/config.json", other);
  EXPECT_TRUE(has(error_of<IoError>([&] { read_model_config(folder / "copy", both()); }),
                  {"[tiny]", "width", "config.json"}));
  // A model of one family does not take the place of one of another.
  const testing::Outcome third =
      train({{"data.path", data}, {"out", folder / "c"}, {"save.final", folder / "model"}});
  EXPECT_EQ(third.exit_code, 1);
  EXPECT_TRUE(has(third.err, {"[gpt2]", "of no GPT-2 model", "config.json"}));
}

}  // namespace
}  // namespace tessera::tools
