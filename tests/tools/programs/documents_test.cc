// Training on documents of which a part is learned, with the program: what it says, plans, resumes
// and refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/marked.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/config/train_config.h"
#include "tools/data/token_writer.h"
#include "tools/train/graph_choice.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

class Documents : public testing::TinyTraining {
 protected:
  Documents() {
    tools::TokenWriter writer(256, /*keeps_documents=*/true);
    for (std::int32_t i = 0; i < 40; ++i) {
      std::vector<std::int32_t> ids;
      for (std::int32_t k = 0; k < 3 + i % 5; ++k) ids.push_back((7 * i + k * k) % 256);
      writer.add_document(testing::marked(ids, i % 3));
    }
    writer.write(folder_ / "documents.bin");
    flags_["data.path"] = folder_ / "documents.bin";
    flags_["data.val_fraction"] = "0.2";
    flags_["train.accum"] = "2";
  }
};

TEST_F(Documents, AreCountedAndTheirTokensAreWhatTheLossIsTheMeanOf) {
  const Outcome outcome = run({{"audit", "true"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  // Documents of 3 to 7 tokens: each has one target less, of every third
  // one of them is not learned.
  EXPECT_TRUE(has(outcome.out, {"32 sequences of 8 at most; of 125 tokens 115 are learned",
                                "audit of a step, rank 0"}));
  EXPECT_EQ(outcome.out.find("differs"), std::string::npos) << outcome.out;
  EXPECT_TRUE(has(folder_.read("run/config.toml"), {"loss_mean = \"auto\""}));
  const json end = final_record();
  EXPECT_NEAR(end.at("val_loss").get<double>(), std::log(256), 0.5);
  // As the mean of means, another result.
  EXPECT_EQ(run({{"train.loss_mean", "batches"}}).exit_code, 0);
  EXPECT_NE(final_record().at("params_sha256"), end.at("params_sha256"));
}

TEST_F(Documents, GoOnFromACheckpointWithTheSameBits) {
  EXPECT_EQ(run({{"train.steps", "4"}}).exit_code, 0);
  const json whole = final_record();
  const Flags saving = {{"train.steps", "4"},
                        {"checkpoint.every", "2"},
                        {"checkpoint.dir", folder_ / "saved"},
                        {"out", folder_ / "first"}};
  EXPECT_EQ(run(saving).exit_code, 0);
  Flags resumed = saving;
  resumed["out"] = folder_ / "run";
  resumed["checkpoint.dir"] = folder_ / "more";
  resumed["resume"] = folder_ / "saved/step_2";
  resumed["parallel.ranks"] = "4";
  resumed["train.accum"] = "1";
  const Outcome outcome = run(resumed);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(final_record().at("params_sha256"), whole.at("params_sha256"));
}

std::string without_time(const std::string& plan) {
  return plan.substr(0, plan.find(", which took this host"));
}
std::string plan_of(const Flags& flags) {
  return without_time(testing::run_program("tools/programs/plan", flags).out);
}

TEST_F(Documents, ArePlannedAsTheyAreTrained) {
  Flags flags = with({{"plan", "true"}});
  const Outcome planned = testing::run_program(testing::kTransformer, flags);
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  flags.erase("plan");
  const std::string plan = plan_of(flags);
  EXPECT_EQ(plan, without_time(planned.out));
  // One message a step more than means of means: how many targets the others have.
  flags["train.loss_mean"] = "batches";
  EXPECT_TRUE(has(plan, {"all_gather     weight"}));
  EXPECT_EQ(plan_of(flags).find("weight "), std::string::npos);
}

TEST_F(Documents, ArePackedIntoSequencesThatAreFewer) {
  const Outcome outcome = run({{"data.packing", "true"}, {"audit", "true"}, {"train.seed", "3"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"17 sequences of 8 that 32 documents and parts are packed into, "
                                "8.1% padding; of 125 tokens 115 are learned",
                                "audit of a step, rank 0"}));
  EXPECT_EQ(outcome.out.find("differs"), std::string::npos) << outcome.out;
  EXPECT_NEAR(final_record().at("val_loss").get<double>(), std::log(256), 0.5);
}

// Of which an epoch in one step has the loss and gradient of one without packing.
TEST_F(Documents, LearnTheSamePackedOrNot) {
  const auto epoch = [&](const Flags& more) {
    Flags flags = more;
    for (const auto& [name, value] : Flags{{"data.val_fraction", "0.2"},
                                           {"train.steps", "1"},
                                           {"train.accum", "1"},
                                           {"parallel.ranks", "1"},
                                           {"train.optimizer", "sgd"},
                                           {"train.grad_clip", "0"},
                                           {"log.every", "1"}}) {
      flags[name] = value;
    }
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return final_record();
  };
  const json alone = epoch({{"train.batch", "32"}});
  const json packed = epoch({{"train.batch", "17"}, {"data.packing", "true"}});
  EXPECT_NEAR(packed.at("val_loss").get<double>(), alone.at("val_loss").get<double>(), 1e-5);
}

TEST_F(Documents, PackedHaveTheBitsOfOneRankAndOfARunThatWasNotInterrupted) {
  const auto on = [](std::int64_t ranks) {
    return Flags{{"train.steps", "6"},
                 {"data.packing", "true"},
                 {"parallel.ranks", std::to_string(ranks)},
                 {"train.accum", std::to_string(4 / ranks)}};
  };
  EXPECT_EQ(run(on(1)).exit_code, 0);
  const json whole = final_record();
  for (const std::string strategy : {"ddp", "zero2", "zero3"}) {
    Flags flags = on(strategy == "ddp" ? 4 : 2);
    flags["parallel.strategy"] = strategy;
    EXPECT_EQ(run(flags).exit_code, 0);
    EXPECT_EQ(final_record().at("params_sha256"), whole.at("params_sha256")) << strategy;
  }
  Flags saving = on(2);
  saving["checkpoint.every"] = "3";
  saving["checkpoint.dir"] = folder_ / "saved";
  saving["out"] = folder_ / "first";
  EXPECT_EQ(run(saving).exit_code, 0);
  Flags resumed = on(4);
  resumed["checkpoint.every"] = "3";
  resumed["checkpoint.dir"] = folder_ / "more";
  resumed["resume"] = folder_ / "saved/step_3";
  EXPECT_EQ(run(resumed).exit_code, 0);
  EXPECT_EQ(final_record().at("params_sha256"), whole.at("params_sha256"));
  resumed["data.packing"] = "false";
  resumed["checkpoint.dir"] = folder_ / "other";
  EXPECT_TRUE(has(run(resumed).out, {"  changed: data.packing=false (was true)",
                                     "so a sample is another than it would have been"}));
}

TEST_F(Documents, PackedArePlannedAsTheyAreTrained) {
  for (const Flags& more : {Flags{}, {{"memory_budget", "1GiB"}}}) {
    Flags flags = with(more);
    flags["data.packing"] = "true";
    flags["plan"] = "true";
    const Outcome planned = testing::run_program(testing::kTransformer, flags);
    EXPECT_EQ(planned.exit_code, 0) << planned.err;
    flags.erase("plan");
    const std::string plan = plan_of(flags);
    EXPECT_EQ(plan, without_time(planned.out));
    flags["data.packing"] = "false";
    EXPECT_NE(plan_of(flags), plan);
  }
}

TEST_F(Documents, AreNoGraphs) {
  tools::TrainConfig config;
  EXPECT_EQ(tools::graph_obstacle(config, 1, /*on_gpus=*/true), "");
  config.train.loss_mean = tools::LossMean::kTokens;
  EXPECT_TRUE(has(tools::graph_obstacle(config, 1, /*on_gpus=*/true), {"train.loss_mean=tokens"}));
  // A plan is of a GPU that is not there, and refuses as well.
  const Flags planned = with({{"device", "cuda"}, {"parallel.ranks", "1"}, {"cuda.graph", "on"}});
  const Outcome refused = testing::run_program("tools/programs/plan", planned);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(has(refused.err, {"got cuda.graph=on where train.loss_mean=tokens"}));
}

TEST_F(Documents, WhatIsSeldomMeantIsSaid) {
  const Outcome cut = run({{"model.seq", "3"}, {"train.loss_mean", "batches"}});
  EXPECT_EQ(cut.exit_code, 0) << cut.err;
  EXPECT_TRUE(has(cut.out + cut.err,
                  {"24 of 40 documents are longer than model.seq=3 and were cut",
                   "0 parts of which nothing is learned", "--train.loss_mean=tokens is"}));
  const Outcome padded = run({{"model.seq", "32"}, {"train.loss_mean", "batches"}});
  EXPECT_TRUE(has(padded.out + padded.err,
                  {"positions are padding", "--model.seq=6 is enough for the longest document"}));
  const Outcome divided = run({{"memory_budget", "1GiB"}, {"train.loss_mean", "batches"}});
  EXPECT_EQ(divided.exit_code, 1);
  EXPECT_TRUE(has(divided.err, {"[memory_budget] expected train.loss_mean=tokens"}));
  EXPECT_EQ(run({{"memory_budget", "1GiB"}}).exit_code, 0);
}

}  // namespace
}  // namespace tessera
