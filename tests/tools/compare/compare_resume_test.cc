// What compare --resume keeps: trainings that one started today would repeat bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/tiny_comparison.h"
#include "tools/compare/training_identity.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::TempFolder;

class CompareResume : public ::testing::Test {
 protected:
  CompareResume() : flags_(testing::tiny_comparison(folder_)) {
    flags_.erase("sweep");
    flags_["strategies"] = "ddp,zero2";
  }

  Outcome compare(const std::map<std::string, std::string>& environment = {}) const {
    return testing::run_program("tools/compare/compare", flags_, environment);
  }
  /// The comparison again, with one strategy more.
  Outcome resume(const std::map<std::string, std::string>& environment = {}) {
    flags_["strategies"] = "ddp,zero2,zero3";
    flags_["resume"] = "true";
    Outcome outcome = compare(environment);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
    EXPECT_TRUE(has(outcome.out, {"all 3 configurations give the same bits"})) << outcome.out;
    return outcome;
  }
  json made_by() const {
    return testing::parse_json(folder_.read("out/compare.json")).at("made_by");
  }
  json done(const std::string& name) const {
    return testing::parse_json(folder_.read("out/runs/" + name + "/round-1/done.json"));
  }

  const TempFolder folder_;
  Flags flags_;
};

TEST_F(CompareResume, TrainingsWhoseDataHaveChangedAreMadeAgain) {
  ASSERT_EQ(compare().exit_code, 0);
  const json before = done("ddp");
  std::string text = folder_.read("text.txt");
  std::ranges::reverse(text);  // of the same length, under the same path
  folder_.write("text.txt", text);
  const Outcome outcome = resume();
  EXPECT_TRUE(has(
      outcome.out,
      {"[1/3] ddp: made again: the data have changed\n[1/3] ddp: loss ",
       "[2/3] zero2: made again: the data have changed\n[2/3] zero2: loss ", "[3/3] zero3: loss "}))
      << outcome.out;
  EXPECT_EQ(outcome.out.find("zero3: made again"), std::string::npos);
  EXPECT_NE(done("ddp").at("data_digest"), before.at("data_digest"));
  EXPECT_EQ(made_by().at("made_again"), json({{"the data have changed", 2}}));
  EXPECT_EQ(made_by().at("kept_trainings"), 0);
  EXPECT_TRUE(has(folder_.read("out/report.html"),
                  {"2 trainings of an earlier start: the data have changed"}));
  // They are those of these data now.
  EXPECT_TRUE(has(resume().out, {"[1/3] ddp: kept\n[2/3] zero2: kept\n[3/3] zero3: kept\n"}));
  EXPECT_TRUE(made_by().at("made_again").empty());
}

// As far as the machine at hand has another library of products, or instruction set.
TEST_F(CompareResume, TrainingsOfAnotherArithmeticAreMadeAgain) {
  ASSERT_EQ(compare().exit_code, 0);
  const json before = done("ddp");
  const Outcome outcome = resume({{"TESSERA_CPU_ISA", "v2"}, {"TESSERA_CPU_GEMM", "eigen"}});
  const bool differs = done("zero3").at("arithmetic") != before.at("arithmetic");
  if (!differs) {
    EXPECT_TRUE(has(outcome.out, {"[1/3] ddp: kept\n[2/3] zero2: kept\n"})) << outcome.out;
    return;
  }
  for (const char* begin : {"[1/3] ddp: made again: the arithmetic has changed: cpu.",
                            "[2/3] zero2: made again: the arithmetic has changed: cpu."}) {
    EXPECT_TRUE(has(outcome.out, {begin})) << outcome.out;
  }
  EXPECT_EQ(done("ddp").at("arithmetic"), done("zero3").at("arithmetic"));
  EXPECT_EQ(made_by().at("made_again").size(), 1u);
}

// Options of the training stand above the environment, which then changes nothing.
TEST_F(CompareResume, WhatTheEnvironmentDoesNotDecideIsKept) {
  flags_["cpu.isa"] = "v2";
  flags_["cpu.gemm"] = "eigen";
  ASSERT_EQ(compare().exit_code, 0);
  EXPECT_TRUE(has(done("ddp").at("arithmetic").get<std::string>(), {"cpu.isa = \"v2\"\n"}));
  const Outcome outcome = resume({{"TESSERA_CPU_ISA", "v2"}, {"TESSERA_CPU_GEMM", "onednn"}});
  EXPECT_TRUE(has(outcome.out, {"[1/3] ddp: kept\n[2/3] zero2: kept\n"})) << outcome.out;
}

// As a host that has lost its power leaves it.
TEST_F(CompareResume, ATrainingWhoseLogCannotBeReadIsMadeAgain) {
  ASSERT_EQ(compare().exit_code, 0);
  const std::string path = "out/runs/ddp/round-1/log.jsonl", whole = folder_.read(path);
  const auto last_line = whole.rfind('\n', whole.size() - 2) + 1;
  for (const std::size_t nbytes : {std::size_t{0}, last_line, last_line + 10}) {
    folder_.write(path, whole.substr(0, nbytes));
    const Outcome outcome = resume();
    EXPECT_TRUE(has(outcome.out, {"[1/3] ddp: made again: its log cannot be read: ", path}))
        << outcome.out;
    EXPECT_TRUE(has(outcome.out, {"\n[1/3] ddp: loss ", "[2/3] zero2: kept\n"})) << outcome.out;
    EXPECT_EQ(made_by().at("made_again"), json({{"its log cannot be read", 1}}));
  }
  EXPECT_TRUE(has(resume().out, {"[1/3] ddp: kept\n[2/3] zero2: kept\n[3/3] zero3: kept\n"}));
}

TEST(WhyAgain, SaysWhatHasChanged) {
  const std::string a = "cpu = \"A\"\ncpu.isa = \"v4\"\n";
  EXPECT_EQ(why_again({"1", a}, {"1", a}), "");
  EXPECT_EQ(why_again({"1", a}, {"2", a}), "the data have changed");
  EXPECT_EQ(why_again({"", a}, {"1", a}), "it does not say which data it had");
  EXPECT_EQ(why_again({"1", ""}, {"1", a}), "it does not say which arithmetic it had");
  EXPECT_EQ(why_again({"1", a}, {"1", "cpu = \"B\"\ncpu.isa = \"v3\"\n"}),
            "the arithmetic has changed: cpu=\"B\" (was \"A\"), cpu.isa=\"v3\" (was \"v4\")");
}

}  // namespace
}  // namespace tessera::tools
