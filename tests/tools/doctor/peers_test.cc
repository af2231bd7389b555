// The doctor under a launcher: whether processes reach each other.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::has;
using testing::Outcome;
using testing::Program;

// Process `process` of three, as torchrun would start it.
std::unique_ptr<Program> start(const std::string& job, int process,
                               std::vector<std::string> arguments) {
  const std::string p = std::to_string(process);
  arguments.emplace_back("--self_test=false");
  return std::make_unique<Program>(
      "tools/doctor/doctor", arguments,
      std::map<std::string, std::string>{
          {"TORCHELASTIC_RUN_ID", job + std::to_string(::getpid())},
          {"RANK", p},
          {"WORLD_SIZE", "3"},
          {"LOCAL_RANK", p},
          {"LOCAL_WORLD_SIZE", "3"},
          {"GROUP_RANK", "0"},
          {"GROUP_WORLD_SIZE", "1"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", "29500"},
          // Where the loader finds the plug-in of this test's own build.
          {"LD_LIBRARY_PATH", std::filesystem::absolute("comm").string()}});
}

TEST(DoctorPeers, EachIsNamedWithItsAddressLatencyAndBandwidth) {
  const testing::TempFolder folder;
  std::vector<std::unique_ptr<Program>> programs;
  for (int p = 0; p < 3; ++p) {
    programs.push_back(start("peers", p, {"--json", "--out=" + folder / "runs"}));
  }
  for (const int p : {1, 2}) {
    const Outcome outcome = programs[static_cast<std::size_t>(p)]->wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
  const Outcome zero = programs[0]->wait();
  EXPECT_EQ(zero.exit_code, 0) << zero.out << zero.err;
  std::map<std::string, json> checks;
  const json report = testing::parse_json(zero.out);
  for (const json& check : report.at("checks")) checks[check.at("name")] = check;
  EXPECT_TRUE(has(checks.at("peers").at("found").get<std::string>(),
                  {"torchrun: 1 host x 3 processes x 1 thread, Gloo ", " at 127.0.0.1"}));
  for (const char* name : {"peer 1", "peer 2"}) {
    const json& peer = checks.at(name);
    EXPECT_TRUE(has(peer.at("found").get<std::string>(), {" at 127.0.0.1: ", " us, ", " GB/s"}));
    EXPECT_NE(peer.at("verdict"), "FAIL") << peer;
    EXPECT_GT(peer.at("latency_us").get<double>(), 0);
    EXPECT_GT(peer.at("bytes_per_s").get<double>(), 0);
  }
  EXPECT_FALSE(checks.contains("peer 3"));
}

TEST(DoctorPeers, OneThatDoesNotComeIsNamed) {
  const auto zero = start("missing", 0, {"--parallel.deadline_s=3"});
  const auto two = start("missing", 2, {"--parallel.deadline_s=3"});
  for (const auto* program : {&zero, &two}) {
    const Outcome outcome = (*program)->wait();
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.out + outcome.err,
                    {"FAIL  peers ", "expected 3 processes at tcp:127.0.0.1:", "missing process 1",
                     "fix: docs/clusters.md"}));
  }
}

TEST(DoctorPeers, WithoutALauncherTheirOptionsAreRefused) {
  const Outcome outcome =
      testing::run_program("tools/doctor/doctor", testing::Flags{{"parallel.address", "tcp:h:1"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected parallel.address where a launcher has started this "
                                "process, got it without one"}));
}

}  // namespace
}  // namespace tessera
