// Training on a mix of files with the program: its bits on any ranks, under every strategy and
// after a resume, what it says, plans and refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shard/placement.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/marked.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/data/token_writer.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kPlanProgram = "tools/programs/plan";

class Mix : public testing::TinyTraining {
 protected:
  Mix() {
    flags_.erase("data.path");
    flags_["data.val_fraction"] = "0.2";
    flags_["data.mix"] = mix("3", "1");
    flags_["model.vocab"] = "256";
    flags_["train.accum"] = "2";
    std::filesystem::create_directory(folder_ / "moved");
    for (const std::string folder : {"", "moved/"}) {
      tools::TokenWriter plain(256), apart(256, /*keeps_documents=*/true);
      for (std::int32_t i = 0; i < 40; ++i) {
        std::vector<std::int32_t> ids;
        for (std::int32_t k = 0; k < 3 + i % 5; ++k) ids.push_back((7 * i + k * k) % 256);
        apart.add_document(testing::marked(ids, i % 3));
        plain.add(ids);
      }
      apart.write(folder_ / (folder + "documents.bin"));
      plain.write(folder_ / (folder + "plain.bin"));
    }
  }
  std::string mix(const std::string& plain, const std::string& documents,
                  const std::string& folder = "") const {
    return folder_ / (folder + "plain.bin:") + plain + "," +
           (folder_ / (folder + "documents.bin:")) + documents;
  }
};

TEST_F(Mix, SaysItsSourcesAndTheirShares) {
  const Outcome outcome = run({{"audit", "true"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"data: 75.0% of " + (folder_ / "plain.bin") + ", 20 sequences of 8",
                                "; 25.0% of " + (folder_ / "documents.bin") +
                                    ", 32 sequences of 8 at most; of 125 tokens 115 are learned",
                                "audit of a step, rank 0"}));
  EXPECT_EQ(outcome.out.find("differs"), std::string::npos) << outcome.out;
  EXPECT_EQ(final_record().count("val_loss"), 1U);
}

// Whatever their weights.
TEST_F(Mix, ItsValidationIsTheMeanOverTheTokensOfAllSources) {
  const Flags once = {{"train.steps", "1"},
                      {"train.optimizer", "sgd"},
                      {"train.lr", "1e-12"},
                      {"train.warmup", "0"},
                      {"train.schedule", "constant"}};
  const auto val_loss = [&](Flags flags) {
    flags.insert(once.begin(), once.end());
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return final_record().at("val_loss").get<double>();
  };
  const double plain = val_loss({{"data.mix", ""}, {"data.path", folder_ / "plain.bin"}});
  const double apart = val_loss({{"data.mix", ""}, {"data.path", folder_ / "documents.bin"}});
  const double num_plain = 4 * 8;
  double num_apart = 0;
  for (int i = 32; i < 40; ++i) num_apart += 2 + i % 5 - (i % 3 == 2 ? 1 : 0);
  EXPECT_GT(std::abs(plain - apart), 1e-3);
  EXPECT_NEAR(val_loss({}), (plain * num_plain + apart * num_apart) / (num_plain + num_apart),
              1e-5);
}

TEST_F(Mix, OfOneFileIsThatFile) {
  const Outcome one = run({{"data.mix", folder_ / "plain.bin:5"}});
  EXPECT_EQ(one.exit_code, 0) << one.err;
  const json end = final_record();
  EXPECT_EQ(run({{"data.mix", ""}, {"data.path", folder_ / "plain.bin"}}).exit_code, 0);
  EXPECT_EQ(final_record().at("params_sha256"), end.at("params_sha256"));
  EXPECT_EQ(final_record().at("data_digest"), end.at("data_digest"));
}

TEST_F(Mix, HasTheBitsOfOneRankAndOfARunThatWasNotInterrupted) {
  const auto on = [](std::int64_t ranks) {
    return Flags{{"train.steps", "6"},
                 {"parallel.ranks", std::to_string(ranks)},
                 {"train.accum", std::to_string(4 / ranks)}};
  };
  EXPECT_EQ(run(on(1)).exit_code, 0);
  const json whole = final_record();
  for (const std::int64_t ranks : {2, 4}) {
    EXPECT_EQ(run(on(ranks)).exit_code, 0);
    EXPECT_EQ(final_record().at("params_sha256"), whole.at("params_sha256")) << ranks;
    EXPECT_EQ(final_record().at("val_loss"), whole.at("val_loss")) << ranks;
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
  resumed["data.mix"] = mix("0.75", "0.25", "moved/");
  const Outcome outcome = run(resumed);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(final_record().at("params_sha256"), whole.at("params_sha256"));
  EXPECT_EQ(outcome.out.find("warning"), std::string::npos) << outcome.out;
  // Other shares are other data.
  resumed["data.mix"] = mix("2", "1");
  resumed["checkpoint.dir"] = folder_ / "other";
  const Outcome other = run(resumed);
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_TRUE(has(other.out, {"warning: other data: ", "from 66.7% ", "(was ", "from 75.0% "}));
  EXPECT_NE(final_record().at("params_sha256"), whole.at("params_sha256"));
}

TEST_F(Mix, HasEqualBitsUnderEveryStrategyWhateverIsGatheredAhead) {
  json first;
  for (const std::string& strategy : shard::Placement::preset_names()) {
    for (const char* prefetch : {"0", "2"}) {
      const bool gathers = shard::Placement::preset(strategy).parameters != shard::Place::kWhole;
      if (prefetch[0] != '0' && !gathers) continue;
      const Outcome outcome =
          run({{"parallel.strategy", strategy}, {"parallel.prefetch", prefetch}});
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      const json final = final_record();
      if (first.is_null()) first = final;
      for (const char* field : {"params_sha256", "val_loss"}) {
        EXPECT_EQ(final.at(field), first.at(field)) << strategy << " " << prefetch;
      }
    }
  }
}

TEST_F(Mix, IsPlannedAsItIsTrained) {
  Flags flags = with({{"plan", "true"}});
  const Outcome planned = testing::run_program(testing::kTransformer, flags);
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  flags.erase("plan");
  const Outcome plan = testing::run_program(kPlanProgram, flags);
  const auto without_time = [](const std::string& text) {
    return text.substr(0, text.find(", which took this host"));
  };
  EXPECT_EQ(without_time(plan.out), without_time(planned.out));
  EXPECT_TRUE(has(plan.out, {"all_gather     weight"}));  // as of documents
}

TEST_F(Mix, RefusesWhatDoesNotBelongTogether) {
  const std::string text = folder_ / "text.txt";
  const std::pair<Flags, std::vector<std::string>> cases[] = {
      {{{"data.path", text}}, {"expected data.path or data.mix, got both"}},
      {{{"data.mix", text + ":1," + (folder_ / "plain.bin:1")}},
       {"one kind of tokens, got text", "data.mix"}},
      {{{"data.mix", text}}, {"expected FILE:WEIGHT", "data.mix"}},
      {{{"data.mix", text + ":1," + text + ":2"}}, {"a file once", "data.mix"}},
      {{{"data.mix", text + ":1"}, {"data.packing", "true"}}, {"documents to pack, got text"}},
      {{{"model.vocab", "200"}}, {"vocabulary of 200", "plain.bin"}},
  };
  for (const auto& [flags, words] : cases) {
    for (const std::string& program : {testing::kTransformer, kPlanProgram}) {
      if (program == kPlanProgram && flags.contains("model.vocab")) continue;  // reads no tokens
      const Outcome refused = testing::run_program(program, with(flags));
      EXPECT_EQ(refused.exit_code, 1) << program;
      for (const std::string& word : words) EXPECT_TRUE(has(refused.err, {word}));
    }
  }
  // A file that a run reads is not written.
  const Outcome clash = run({{"log.jsonl", folder_ / "plain.bin"}});
  EXPECT_EQ(clash.exit_code, 1);
  EXPECT_TRUE(has(clash.err, {"log.jsonl", "data.mix", "plain.bin"}));
  const Outcome missing = run({{"data.mix", folder_ / "none.bin:1"}});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_TRUE(has(missing.err, {"none.bin"}));
}

}  // namespace
}  // namespace tessera
