// Every preset, as programs take it: planned and looked at in its own size, and trained from
// scratch and compared in a small one.
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/models/family.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

const std::string kCompare = "tools/compare/compare";

class Presets : public testing::TinyTraining {
 protected:
  Presets() : text_(flags_.at("data.path")) {}

  /// Options of a training of `preset` that takes a moment. The rest is the preset's own: what is
  /// tied, biases, norms, the width of heads, how positions are rotated.
  static Flags small(const std::string& preset) {
    Flags flags = {{"model.preset", preset}, {"model.layers", "2"}, {"model.heads", "2"},
                   {"model.dim", "16"},      {"model.seq", "8"},    {"model.vocab", "256"}};
    for (const auto& [name, help] : tools::preset_config(preset).family->numbers()) {
      if (!help.empty()) flags["model." + name] = name == "kv_heads" ? "1" : "12";
    }
    return flags;
  }
  Outcome compare(Flags flags) const {
    flags.insert({{"data.path", text_},
                  {"device", "cpu"},
                  {"log.peak_ms", "0"},
                  {"strategies", "zero3,ddp"},
                  {"parallel.ranks", "2"},
                  {"train.batch", "1"},
                  {"out", folder_ / "compared"}});
    return run_program(kCompare, flags);
  }

  const std::string text_;
};

// Shards are padded by less than a fiftieth.
TEST_F(Presets, ArePlannedAndLookedAtInTheirOwnSize) {
  for (const std::string& preset : tools::preset_names()) {
    SCOPED_TRACE(preset);
    const std::int64_t num_parameters = tools::preset_config(preset).num_parameters();
    const Outcome plan = run_program("tools/programs/plan", Flags{{"model.preset", preset},
                                                                  {"device", "cpu"},
                                                                  {"parallel.ranks", "8"},
                                                                  {"train.batch", "1"},
                                                                  {"json", "true"}});
    ASSERT_EQ(plan.exit_code, 0) << plan.err;
    const std::int64_t shard = testing::parse_json(plan.out).at("peak_bytes").at("parameter_shard");
    EXPECT_GE(8 * shard, 4 * num_parameters);
    EXPECT_LE(8 * shard, 4 * num_parameters / 50 * 51);
    const Outcome table = compare({{"model.preset", preset}, {"model.seq", "8"}, {"plan", "true"}});
    EXPECT_EQ(table.exit_code, 0) << table.err;
    EXPECT_TRUE(has(table.out, {"\nzero3 ", "\nddp "})) << table.out;
    const Outcome doctor = run_program("tools/doctor/doctor", Flags{{"model.preset", preset},
                                                                    {"data.path", text_},
                                                                    {"out", folder_ / "runs"},
                                                                    {"self_test", "false"},
                                                                    {"json", "true"}});
    std::int64_t offload_nbytes = 0;
    const json report = testing::parse_json(doctor.out);
    for (const json& check : report.at("checks")) {
      if (check.at("name") == "locked memory") offload_nbytes = check.at("offload_bytes");
    }
    EXPECT_EQ(offload_nbytes, 16 * num_parameters);
  }
}

TEST_F(Presets, TrainFromScratchWithEqualBitsAsPlanned) {
  for (const std::string& preset : tools::preset_names()) {
    SCOPED_TRACE(preset);
    Flags flags = small(preset);
    flags["train.steps"] = "3";
    flags["warmup_steps"] = "1";
    flags["out"] = folder_ / preset;
    const Outcome outcome = compare(flags);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const json results = testing::parse_json(folder_.read(preset + "/compare.json"));
    EXPECT_EQ(results.at("configurations").size(), 2u);
    for (const json& c : results.at("configurations")) {
      const std::string name = c.at("name");
      EXPECT_EQ(c.at("state"), "done") << name;
      EXPECT_EQ(c.at("model").at("preset"), preset) << name;
      EXPECT_TRUE(c.at("parity").at("equal_parameters").get<bool>()) << name;
      EXPECT_EQ(c.at("parity").at("max_loss_difference"), 0.0) << name;
      EXPECT_EQ(c.at("peak_bytes"), c.at("planned").at("peak_bytes")) << name;
      EXPECT_EQ(c.at("metrics").at("sent_bytes").at("median"), c.at("planned").at("sent_bytes"))
          << name;
    }
  }
}

}  // namespace
}  // namespace tessera
