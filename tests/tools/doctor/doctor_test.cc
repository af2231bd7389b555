// The doctor as a person meets it: the program, its lines and its exit code.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "engine/io/safetensors.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/small_models.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

using Words = std::vector<std::string>;

const std::string kDoctor = "tools/doctor/doctor";

TEST(Doctor, FindsNothingBrokenWhereTestsRun) {
  const TempFolder folder;
  const Outcome outcome = run_program(kDoctor, Flags{{"json", "true"}, {"out", folder / "runs"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const json report = testing::parse_json(outcome.out);
  EXPECT_NE(report.at("verdict"), "FAIL");
  std::set<std::string> names;
  for (const json& check : report.at("checks")) {
    names.insert(check.at("name").get<std::string>());
    EXPECT_EQ(check.at("fix").get<std::string>().empty(), check.at("verdict") == "ok") << check;
  }
  for (const char* name : {"cpu", "products", "cores", "memory", "huge pages", "gpus", "nccl",
                           "locked memory", "open files", "text", "output", "product", "memcpy",
                           "all_gather", "reduce_scatter", "rates"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_FALSE(names.contains("images")) << "train_transformer has none";
  EXPECT_EQ(folder.num_entries(), 0);
}

// What is to be run says what is looked at.
TEST(Doctor, LooksAtWhatTheMlpNeedsAlone) {
  const TempFolder folder;
  const Flags mlp{
      {"for", "mlp"}, {"json", "true"}, {"self_test", "false"}, {"out", folder / "runs"}};
  const Outcome outcome = run_program(kDoctor, mlp);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  std::map<std::string, json> checks;
  const json report = testing::parse_json(outcome.out);
  for (const json& check : report.at("checks")) checks[check.at("name")] = check;
  EXPECT_EQ(checks.at("images").at("images"), 60'000);
  EXPECT_FALSE(checks.contains("text"));
  // 784 x 256, 256 x 256, 256 x 10, and biases: 269,322 parameters of 16 bytes.
  EXPECT_EQ(checks.at("locked memory").at("offload_bytes"), 4'309'152);
  EXPECT_TRUE(has(checks.at("locked memory").at("found").get<std::string>(),
                  {"all of the MLP takes 4.1 MiB (16 B x 0.3M)"}));
  Flags elsewhere = mlp;
  elsewhere["data.path"] = folder / "none";
  EXPECT_EQ(run_program(kDoctor, elsewhere).exit_code, 1);
  const Outcome preset = run_program(kDoctor, Flags{{"for", "mlp"}, {"model.preset", "gpt2-xl"}});
  EXPECT_EQ(preset.exit_code, 1);
  EXPECT_TRUE(has(preset.err, {"model.preset with for=transformer only"}));
}

TEST(Doctor, LooksAtWhatAModelInAFolderNeeds) {
  const TempFolder folder;
  const auto doctor = [&](Flags flags) {
    flags.insert({{"json", "true"}, {"self_test", "false"}, {"out", folder / "runs"}});
    return run_program(kDoctor, flags);
  };
  for (const testing::SmallModel& model : testing::small_model_of_each_family()) {
    SCOPED_TRACE(model.family);
    std::int64_t numel = 0;
    const engine::SafetensorsFile file(model.path + "/model.safetensors");
    for (const engine::TensorInfo& tensor : file.tensors()) numel += engine::numel(tensor.shape);
    const Outcome outcome = doctor({{"init.from", model.path}});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
    std::map<std::string, json> checks;
    const json report = testing::parse_json(outcome.out);
    for (const json& check : report.at("checks")) checks[check.at("name")] = check;
    const json& memory = checks.at("locked memory");
    EXPECT_EQ(memory.at("offload_bytes"), 16 * numel);
    EXPECT_TRUE(has(memory.at("found").get<std::string>(), {"all of " + model.path + " takes"}));
  }
  const auto refused = [&](Flags flags, const std::string& words) {
    flags["init.from"] = folder / "none";
    const Outcome outcome = doctor(flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {words, folder / "none"})) << outcome.err;
  };
  refused({}, "config.json");
  refused({{"for", "mlp"}}, "init.from with for=transformer only");
  refused({{"model.preset", "gpt2"}}, "model.preset or init.from, got both");
}

// Outside of `bazel run` there is no data, and what helps a trainer helps the doctor.
TEST(Doctor, WhatItsFixSaysMendsItAndNothingElseBreaks) {
  const TempFolder folder;
  // A copy, as what Bazel built has its data beside it.
  std::filesystem::copy_file(kDoctor, folder / "doctor");
  const std::string doctor = "./doctor --self_test=false";
  const auto elsewhere = [&](const std::string& more) {
    return run_program("/bin/sh", Words{"-c", "cd " + folder.path() + " && " + doctor + more});
  };
  const Outcome without = elsewhere("");
  EXPECT_EQ(without.exit_code, 1);
  EXPECT_TRUE(has(without.out, {"FAIL  text ", "--data.path=FILE", " 1 failed\n"}));
  folder.write("kjv.txt", "In the beginning God created the heaven and the earth.");
  const Outcome with = elsewhere(" --data.path=kjv.txt");
  EXPECT_EQ(with.exit_code, 0) << with.out;
  EXPECT_TRUE(has(with.out, {"ok    text ", " 0 failed\n"}));
}

// The line of rates is one that plan takes as it stands.
TEST(Doctor, SaysTheRatesThatPlanTakes) {
  const TempFolder folder;
  const Outcome outcome = run_program(kDoctor, Flags{{"json", "true"}, {"out", folder / "runs"}});
  const json report = testing::parse_json(outcome.out);
  for (const json& check : report.at("checks")) {
    if (check.at("name") != "rates") continue;
    const std::string found = check.at("found");
    const std::string flags = found.substr(found.find("--rates.gflops="));
    const Outcome plan = run_program(
        "/bin/sh", Words{"-c",
                         "tools/programs/plan --device=cpu --model.layers=1 --model.dim=8 "
                         "--model.heads=1 --model.vocab=256 --offload.optimizer=1 " +
                             flags});
    EXPECT_EQ(plan.exit_code, 0) << plan.err;
    EXPECT_TRUE(has(flags, {"--rates.memory_gbs=", "--rates.link_gbs=", "--rates.link_latency_us=",
                            "--rates.host_memory_gbs="}));
    EXPECT_EQ(flags.find("host_link"), std::string::npos) << "a CPU has none";
    return;
  }
  ADD_FAILURE() << outcome.out;
}

TEST(Doctor, EndsWithOneWhereSomethingFails) {
  const Flags quick{{"self_test", "false"}};
  const Outcome isa = run_program(kDoctor, quick, {{"TESSERA_CPU_ISA", "v9"}});
  EXPECT_EQ(isa.exit_code, 1);
  EXPECT_TRUE(has(isa.out, {"FAIL  cpu ", "v9", "fix: unset TESSERA_CPU_ISA", " failed\n"}));
  const Outcome data = run_program(kDoctor, Flags{{"self_test", "false"}, {"data.path", "/none"}});
  EXPECT_EQ(data.exit_code, 1);
  EXPECT_TRUE(has(data.out, {"FAIL  text ", "/none", "fix: "}));
  const Outcome out = run_program(kDoctor, Flags{{"self_test", "false"}, {"out", "/proc/none"}});
  EXPECT_EQ(out.exit_code, 1);
  EXPECT_TRUE(has(out.out, {"FAIL  output "}));
}

TEST(Doctor, AReaderThatHasGoneEndsItInSilence) {
  const TempFolder folder;
  const std::string pipe = folder / "pipe";
  const std::string script = "mkfifo " + pipe + "; exec 4<>" + pipe + " 5>" + pipe + " 4<&-; " +
                             kDoctor + " --self_test=false --out=" + folder / "runs" + " >&5";
  const Outcome outcome = run_program("/bin/sh", Words{"-c", script});
  EXPECT_EQ(outcome.exit_code, 128 + SIGPIPE);
  EXPECT_EQ(outcome.err, "");
}

TEST(Doctor, AWarningIsNoFailure) {
  const Outcome outcome =
      run_program(kDoctor, Flags{{"self_test", "false"}}, {{"WORLD_SIZE", "4"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(has(outcome.out, {"warn  launcher ", "expected RANK with WORLD_SIZE=4"}));
}

TEST(Doctor, UnknownFlagsAreRefused) {
  const Outcome outcome = run_program(kDoctor, Flags{{"jsn", "true"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"jsn", "did you mean json?"}));
}

// Rank 2 never came.
std::string flight_text(int num_ranks) {
  std::string ranks;
  for (int r = 0; r < num_ranks; ++r) {
    const std::string entry =
        R"({"group":0,"seq":17,"op":"all_gather","dtype":"f32","count":8,"label":"h.3",)"
        R"("state":"failed","called_ns":1,"started_ns":1000000000,"ended_ns":3000000001})";
    ranks += (r == 0 ? "" : ",") + std::string("{\"rank\":") + std::to_string(r) +
             ",\"calls\":18,\"entries\":[" + (r == 2 ? "" : entry) + "]}";
  }
  return R"({"format":"tessera flight","version":1,"error":"[all_gather] \u001b[2J\n  why","now_ns":4,)"
         R"("failed_ns":3000000000,"groups":[{"name":"world","members":[0,1,2,3]}],"ranks":[)" +
         ranks + "]}";
}

TEST(Doctor, SaysWhoWasLateInARunThatFailed) {
  const TempFolder folder;
  const std::string path = folder.write("flight.json", flight_text(4));
  const Outcome outcome = run_program(kDoctor, Words{"--flight", path});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.out,
            "rank 2 never called all_gather f32 x 8 'h.3' (call 17 of world), which ranks 0-1, 3 "
            "wait for since 2.0 s\n  rank 2 called nothing at all\n" +
                path + " ended with: [all_gather] \\x1b[2J\n");
  const Outcome as_json = run_program(kDoctor, Words{"--json", "--flight=" + path});
  EXPECT_EQ(as_json.exit_code, 1);
  const json report = testing::parse_json(as_json.out);
  EXPECT_EQ(report.at("finding"), "a rank was late");
  EXPECT_EQ(report.at("lines").size(), 2);
  EXPECT_EQ(report.at("errors"), json::array({"[all_gather] \x1b[2J\n  why"}));
}

TEST(Doctor, LooksAtARecordingAlone) {
  const TempFolder folder;
  const std::string path = folder.write("flight.json", flight_text(4));
  for (const std::string name :
       {"for", "self_test", "out", "data.path", "model.preset", "init.from"}) {
    const std::string value = name == "self_test" ? "false"
                              : name == "for"     ? "mlp"
                              : name == "out"     ? "runs"
                                                  : "small";
    const Outcome outcome =
        run_program(kDoctor, Words{"--flight", path, "--" + name + "=" + value});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[config] expected " + name + " without flight only"}));
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(Doctor, TakesSeveralRecordingsAndNamesOneThatItCannotBelieve) {
  const TempFolder folder;
  const std::string path = folder.write("flight.json", flight_text(4));
  const Outcome twice = run_program(kDoctor, Words{"--flight", path, path});
  EXPECT_EQ(twice.exit_code, 1);
  EXPECT_TRUE(has(twice.err, {"[flight] expected each rank in one file, got rank 0 again", path}));
  const std::string spoiled = folder.write("spoiled.json", "{}");
  const Outcome unreadable = run_program(kDoctor, Words{"--flight", path, spoiled});
  EXPECT_EQ(unreadable.exit_code, 1);
  EXPECT_TRUE(has(unreadable.err, {"[flight] expected format, got none", "spoiled.json"}));
  const Outcome none = run_program(kDoctor, Words{"--flight", "--json"});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_TRUE(has(none.err, {"[flight] expected files, as --flight FILE..., got none"}));
}

}  // namespace
}  // namespace tessera
