// Parts of the benchmark as a person runs them, and what their figures say.
#include <gtest/gtest.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::Outcome;
using testing::run_program;

struct Benched {
  std::string out;
  std::vector<json> rows;  // of the part alone
};

Benched bench(const std::string& part, Flags flags = {}) {
  const testing::TempFolder folder;
  flags["bench.parts"] = part;
  flags["bench.jsonl"] = folder / "lines";
  const Outcome outcome = run_program("tools/bench/bench", flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  Benched benched{outcome.out, {}};
  std::istringstream lines(folder.read("lines"));
  for (std::string line; std::getline(lines, line);) {
    json row = testing::parse_json(line);
    if (row.at("part") == part) benched.rows.push_back(std::move(row));
  }
  return benched;
}

TEST(BenchProgram, PlansTakeATimeThatCanBeRead) {
  const Benched plans = bench("plan", {{"bench.samples", "2"}});
  ASSERT_EQ(plans.rows.size(), 2u);
  for (const json& row : plans.rows) {
    EXPECT_GE(row.at("ms").get<double>(), 0.5) << row;
    EXPECT_LT(row.at("ms").get<double>(), 1e5) << row;
    EXPECT_LE(row.at("min_ms"), row.at("ms"));
    EXPECT_LE(row.at("ms"), row.at("max_ms"));
    EXPECT_GT(row.at("launches"), 100) << row;
  }
  const std::string table = plans.out.substr(plans.out.find("make_plan()"));
  EXPECT_EQ(table.find(" 0.0"), std::string::npos) << table;
  // 124M parameters against 1,558M, of which each of 8 ranks keeps an eighth: 16 bytes each.
  const double small = plans.rows[0].at("peak_gib"), large = plans.rows[1].at("peak_gib");
  EXPECT_GT(small, 0.124 * 16 / 8 / 1.0738);
  EXPECT_GT(large, 1.558 * 16 / 8 / 1.0738);
  EXPECT_LT(large, 16);
}

// The line that is printed is one that plan takes, with the figures of the table.
TEST(BenchProgram, RatesAreThoseThatPlanTakes) {
  const Benched rates = bench("rates");
  ASSERT_EQ(rates.rows.size(), 2u);
  for (const json& row : rates.rows) {
    const std::string begin =
        "plan --precision.param=" + row.at("dtype").get<std::string>() + " --rates.";
    const std::size_t at = rates.out.find(begin);
    ASSERT_NE(at, std::string::npos) << rates.out;
    std::istringstream words(rates.out.substr(at, rates.out.find('\n', at) - at));
    std::string word;
    words >> word;  // plan
    std::vector<std::string> arguments = {"--device=cpu",      "--model.layers=1",
                                          "--model.dim=8",     "--model.heads=1",
                                          "--model.vocab=256", "--offload.optimizer=1"};
    std::set<std::string> names;
    while (words >> word) {
      arguments.push_back(word);
      const std::string option = "--rates.";
      if (!word.starts_with(option)) continue;
      const std::size_t equals = word.find('=');
      const std::string name = word.substr(option.size(), equals - option.size());
      const double value = std::stod(word.substr(equals + 1));
      names.insert(name);
      EXPECT_GT(value, 0) << word;
      EXPECT_NEAR(value, row.at(name).get<double>(), 0.02 * value) << word;
    }
    EXPECT_EQ(names, (std::set<std::string>{"gflops", "memory_gbs", "link_gbs", "link_latency_us",
                                            "host_memory_gbs"}));
    const Outcome plan = run_program("tools/programs/plan", arguments);
    EXPECT_EQ(plan.exit_code, 0) << plan.err;
  }
}

}  // namespace
}  // namespace tessera
