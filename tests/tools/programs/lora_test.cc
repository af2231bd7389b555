// Training adapters: what it leaves is the same however it is trained, interrupted, saved and
// merged; the model itself stays as it is and takes no memory but its own.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

const std::string kWeights = "/model.safetensors", kAdapters = "/adapter_model.safetensors",
                  kAdapterConfig = "/adapter_config.json";

Flags merged(Flags flags, const Flags& more) {
  for (const auto& [name, value] : more) flags[name] = value;
  return flags;
}

std::string digest(const Outcome& outcome) {
  const std::string before = "parameters sha256 ";
  const auto at = outcome.out.find(before);
  EXPECT_NE(at, std::string::npos) << outcome.err;
  return at == std::string::npos ? "" : outcome.out.substr(at + before.size(), 64);
}

class LoraRun : public testing::TinyTraining {
 protected:
  LoraRun() {
    flags_["lora.rank"] = "2";
    flags_["lora.targets"] = "all-linear";
  }

  struct Kind {
    std::string name;
    Flags flags;
    std::string target;  ///< one of those that have adapters
  };
  /// Models of three kinds.
  std::vector<Kind> models() const {
    return {{"gpt2", {}, "c_attn"},
            {"llama",
             {{"model.preset", "smollm2-135m"},
              {"model.dim", "24"},
              {"model.heads", "6"},
              {"model.kv_heads", "2"},
              {"model.mlp_dim", "10"},
              {"model.vocab", "256"}},
             "q_proj"},
            {"gpt_neox",
             {{"model.preset", "pythia-160m"},
              {"model.dim", "16"},
              {"model.mlp_dim", "10"},
              {"model.vocab", "256"}},
             "query_key_value"}};
  }
  /// A model in "base", without adapters, and flags of a run that begins from it.
  Flags based() const {
    Flags flags = with(
        {{"save.final", folder_ / "base"}, {"train.steps", "1"}, {"out", folder_ / "base.run"}});
    flags.erase("lora.rank");
    flags.erase("lora.targets");
    const Outcome outcome = run_program(testing::kTransformer, flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return {{"init.from", folder_ / "base"}};
  }
  Outcome convert(const std::string& from, const std::string& to, const Flags& more) const {
    return run_program("tools/convert/convert",
                       merged({{"from", folder_ / from}, {"to", folder_ / to}}, more));
  }
  bool is_same(const std::string& a, const std::string& b) const {
    return folder_.read(a) == folder_.read(b);
  }
};

TEST_F(LoraRun, HasEqualBitsHoweverItIsTrained) {
  for (const auto& [name, model, target] : models()) {
    SCOPED_TRACE(name);
    const Flags flags = merged(model, {{"lora.dropout", "0.25"}, {"parallel.ranks", "4"}});
    const std::string expected = digest(run(flags));
    for (const char* strategy : {"ddp", "zero1", "zero2", "shard_grad_op", "hsdp"}) {
      EXPECT_EQ(digest(run(merged(flags, {{"parallel.strategy", strategy}}))), expected)
          << strategy;
    }
    EXPECT_EQ(digest(run(merged(flags, {{"train.recompute", "true"}}))), expected);
    EXPECT_EQ(digest(run(merged(flags, {{"train.recompute", "1"}}))), expected);
    EXPECT_EQ(digest(run(merged(flags, {{"parallel.unit_min_numel", "100000"}}))), expected);
    EXPECT_EQ(digest(run(merged(flags, {{"parallel.ranks", "2"}, {"train.accum", "2"}}))),
              expected);
    EXPECT_EQ(digest(run(merged(flags, {{"parallel.ranks", "1"}, {"train.accum", "4"}}))),
              expected);
    EXPECT_EQ(digest(run(merged(flags, {{"offload.optimizer", "1"}, {"offload.parameters", "1"}}))),
              expected);
    EXPECT_NE(digest(run(merged(flags, {{"lora.dropout", "0.5"}}))), expected);
    EXPECT_NE(digest(run(merged(flags, {{"train.seed", "7"}}))), expected);
  }
}

TEST_F(LoraRun, GoesOnWithEqualBitsAfterAnInterruption) {
  for (const auto& [name, model, target] : models()) {
    SCOPED_TRACE(name);
    const std::string out = folder_ / name;
    const Flags flags = merged(model, {{"train.steps", "6"},
                                       {"train.schedule", "constant"},
                                       {"lora.dropout", "0.25"},
                                       {"out", out}});
    const Flags saves = merged(flags, {{"checkpoint.every", "2"}, {"resume", "auto"}});
    ASSERT_EQ(run(merged(saves, {{"train.steps", "4"}})).exit_code, 0);
    const Outcome longer = run(saves);
    EXPECT_EQ(digest(longer), digest(run(merged(flags, {{"out", out + "_once"}}))));
    EXPECT_TRUE(has(longer.out, {"step 4"})) << longer.out;
    // On one rank, under another strategy, from step 4.
    const std::string at_4 = out + "/checkpoints/step_4";
    const Outcome other = run(merged(flags, {{"resume", at_4},
                                             {"parallel.strategy", "ddp"},
                                             {"parallel.ranks", "1"},
                                             {"train.accum", "2"},
                                             {"out", out + "_other"}}));
    EXPECT_EQ(digest(other), digest(longer));
    // Other adapters are another model.
    for (const auto& [option, value] :
         Flags{{"lora.rank", "3"}, {"lora.alpha", "5"}, {"lora.targets", target}}) {
      const std::string words = option == "lora.alpha"
                                    ? "\n  changed since it was saved: lora.alpha=5.0 (was "
                                    : "lora_A.weight";
      const Outcome refused =
          run(merged(flags, {{"resume", at_4}, {option, value}, {"out", out + "_refused"}}));
      EXPECT_EQ(refused.exit_code, 1) << option;
      EXPECT_TRUE(has(refused.err, {"[checkpoint] expected", words})) << option << refused.err;
    }
  }
}

TEST_F(LoraRun, IsAsPlannedToTheByte) {
  for (const auto& [name, model, target] : models()) {
    for (const char* strategy : {"zero3", "zero2", "ddp"}) {
      SCOPED_TRACE(name + " " + strategy);
      const Outcome outcome = run(merged(model, {{"parallel.strategy", strategy},
                                                 {"precision.param", "bf16"},
                                                 {"train.recompute", "true"},
                                                 {"lora.dropout", "0.1"},
                                                 {"audit", "true"}}));
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_TRUE(has(outcome.out, {"3 steps are as planned on each of 2 ranks"})) << outcome.out;
    }
  }
}

// No master, no gradient and no state of the optimizer.
TEST_F(LoraRun, TheModelTakesItsOwnMemoryAlone) {
  flags_["parallel.ranks"] = "1";
  flags_["lora.targets"] = "c_attn";
  flags_["model.dim"] = "64";
  const std::int64_t dim = 64, rank = 2, adapters = 2 * rank * (dim + 3 * dim);
  const std::int64_t of_layer = 12 * dim * dim + 13 * dim,
                     base = 2 * of_layer + (256 + 8 + 2) * dim;
  for (const auto& [param, nbytes] : {std::pair("f32", 4), std::pair("bf16", 2)}) {
    SCOPED_TRACE(param);
    Flags flags = with({{"precision.param", param}, {"json", "true"}});
    const Outcome outcome = run_program("tools/programs/plan", flags);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const nlohmann::json plan = testing::parse_json(outcome.out);
    const std::string text = testing::json_text(plan);
    const nlohmann::json memory = plan.at("peak_bytes");
    EXPECT_EQ(memory.at("optimizer"), 8 * adapters) << text;
    // A bf16 copy is computed with where a master is f32. A block is padded by less than 2 %.
    const std::int64_t exact = base * nbytes + adapters * (nbytes == 2 ? 4 + 2 : 4);
    EXPECT_GE(memory.at("parameter_shard"), exact) << text;
    EXPECT_LE(memory.at("parameter_shard"), exact + exact / 50) << text;
  }
}

TEST_F(LoraRun, TellsHowManyParametersAreTrained) {
  const Outcome outcome = run({{"lora.targets", "c_attn"}});
  EXPECT_TRUE(has(outcome.out, {"parameters, of which 128 in adapters are trained; data"}))
      << outcome.out;
  flags_.erase("lora.rank");
  flags_.erase("lora.targets");
  EXPECT_EQ(run({}).out.find("adapters"), std::string::npos);
}

TEST_F(LoraRun, AdaptersAreSavedMergedAndGoneOnWith) {
  const Flags from = based();
  const Outcome trained =
      run(merged(from, {{"save.final", folder_ / "tuned"}, {"checkpoint.every", "3"}}));
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_TRUE(has(trained.out, {"adapters in "}));
  EXPECT_FALSE(exists("tuned" + kWeights));
  EXPECT_EQ(testing::parse_json(folder_.read("tuned" + kAdapterConfig)),
            testing::parse_json(fmt::format(
                R"({{"alpha_pattern": {{}}, "base_model_name_or_path": "{}", "bias": "none",
                     "fan_in_fan_out": true, "inference_mode": true, "init_lora_weights": true,
                     "lora_alpha": 16, "lora_dropout": 0, "modules_to_save": null,
                     "peft_type": "LORA", "r": 2, "rank_pattern": {{}},
                     "target_modules": ["c_attn", "c_proj", "c_fc"], "task_type": "CAUSAL_LM",
                     "use_dora": false, "use_rslora": false}})",
                folder_ / "base")));
  // The checkpoint has the same adapters, and the model as it was.
  ASSERT_EQ(convert("run/checkpoints", "again", {{"base", folder_ / "base"}}).exit_code, 0);
  EXPECT_TRUE(is_same("again" + kAdapters, "tuned" + kAdapters));
  EXPECT_TRUE(is_same("again" + kAdapterConfig, "tuned" + kAdapterConfig));
  const Outcome whole = convert("tuned", "whole", {{"merge", "true"}});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_TRUE(has(whole.out, {"model in ", "/whole: ", "/base with the adapters of "}));
  ASSERT_EQ(convert("run/checkpoints", "whole2", {{"merge", "true"}}).exit_code, 0);
  EXPECT_TRUE(is_same("whole2" + kWeights, "whole" + kWeights));
  EXPECT_FALSE(is_same("whole" + kWeights, "base" + kWeights));
  // What nothing was learned in adds nothing, as B is 0.
  ASSERT_EQ(run(merged(from, {{"save.final", folder_ / "new"}, {"train.steps", "0"}})).exit_code,
            0);
  ASSERT_EQ(convert("new", "unchanged", {{"merge", "true"}}).exit_code, 0);
  EXPECT_TRUE(is_same("unchanged" + kWeights, "base" + kWeights));
  EXPECT_FALSE(is_same("new" + kAdapters, "tuned" + kAdapters));
  // From what was saved on: also with nothing said but where it lies.
  const Flags on = merged(from, {{"lora.from", folder_ / "tuned"}, {"out", folder_ / "on"}});
  Flags bare = with(merged(on, {{"train.steps", "0"}, {"save.final", folder_ / "same"}}));
  bare.erase("lora.rank");
  bare.erase("lora.targets");
  const Outcome same = run_program(testing::kTransformer, bare);
  ASSERT_EQ(same.exit_code, 0) << same.err;
  EXPECT_TRUE(is_same("same" + kAdapters, "tuned" + kAdapters));
  EXPECT_EQ(digest(same), digest(trained));
  EXPECT_NE(digest(run(on)), digest(trained));
  const Flags wrong = {{"lora.rank", "3"}, {"lora.alpha", "8"}, {"lora.targets", "c_attn"}};
  for (const auto& [option, value] : wrong) {
    const Outcome refused = run(merged(on, {{option, value}}));
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_TRUE(has(refused.err, {"[lora.from] expected " + option + " of ", ", got " + value}));
  }
  // Adapters of another model.
  flags_["model.layers"] = "1";
  const Outcome other = run({{"lora.from", folder_ / "tuned"}, {"out", folder_ / "other"}});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(has(other.err, {"[lora] expected the 8 tensors of the model, got 8 differences",
                              "\"h.1.attn.c_attn.lora_A.weight\" (2, 8) is unexpected"}))
      << other.err;
}

TEST_F(LoraRun, WhatCannotBeHonouredIsRefusedByName) {
  const auto refused = [&](const Flags& more, std::initializer_list<std::string_view> words) {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 1) << testing::json_text(nlohmann::json(more));
    EXPECT_TRUE(has(outcome.err, words)) << outcome.err;
  };
  refused({{"lora.targets", "c_fc,q_proj"}},
          {"[lora] expected targets of c_attn, c_proj, c_fc, or all-linear, got 'q_proj' "
           "(lora.targets)"});
  refused({{"lora.targets", "c_fc,"}, {"lora.rank", "65537"}}, {"lora.rank"});
  refused({{"save.final", folder_ / "tuned"}}, {"expected save.final with init.from"});
  const Flags from = based();
  refused(merged(from, {{"save.final", folder_ / "base"}}),
          {"expected a folder for adapters, got one with a whole model"});
  refused(merged(from, {{"save.final", folder_ / "tuned"}, {"save.shard_gib", "1"}}),
          {"expected no save.shard_gib with lora.rank"});
  for (const auto& [option, value] :
       Flags{{"lora.alpha", "8"}, {"lora.dropout", "0.1"}, {"lora.targets", "c_attn"}}) {
    Flags flags = with({{option, value}});
    flags.erase("lora.rank");
    if (option != "lora.targets") flags.erase("lora.targets");
    const Outcome outcome = run_program(testing::kTransformer, flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"expected " + option + " with lora.rank or lora.from"}));
  }
  ASSERT_EQ(
      run(merged(from, {{"save.final", folder_ / "tuned"}, {"checkpoint.every", "3"}})).exit_code,
      0);
  const auto not_converted = [&](const std::string& from_name, const Flags& more,
                                 std::initializer_list<std::string_view> words) {
    const Outcome outcome = convert(from_name, "nothing", more);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, words)) << outcome.err;
    EXPECT_FALSE(exists("nothing" + kWeights));
  };
  not_converted("tuned", {}, {"expected --merge of adapters"});
  // The model itself stays, and no folder has both.
  const auto not_merged = [&](const std::string& to,
                              std::initializer_list<std::string_view> words) {
    const Outcome outcome = convert("tuned", to, {{"merge", "true"}});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, words)) << outcome.err;
  };
  const std::string before = folder_.read("base" + kWeights);
  not_merged("base", {"expected another folder than the model's own", "(to)"});
  const Outcome onto_base =
      convert("run/checkpoints", "base/.", {{"merge", "true"}, {"base", folder_ / "base"}});
  EXPECT_EQ(onto_base.exit_code, 1);
  EXPECT_TRUE(has(onto_base.err, {"expected another folder than the model's own", "(to)"}));
  EXPECT_EQ(folder_.read("base" + kWeights), before);
  not_merged("tuned", {"got one with an adapter", "choose another folder"});
  EXPECT_FALSE(exists("tuned" + kWeights));
  not_converted("run/checkpoints/step_3", {}, {"expected --base with adapters", "(base, "});
  not_converted("run/checkpoints/step_3", {{"base", folder_ / "base"}, {"shard_gib", "1"}},
                {"expected a model with --shard_gib, or --merge, got adapters", "(shard_gib, "});
  not_converted("base", {{"merge", "true"}}, {"expected a checkpoint with --merge, got a model"});
}

}  // namespace
}  // namespace tessera
