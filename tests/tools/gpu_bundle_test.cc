// The folder for another machine's GPU, as far as it can be tried without one.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

Outcome make_bundle(const std::string& folder) {
  return run_program("tools/gpu_bundle",
                     std::vector<std::string>{folder, "--max_mib=" + std::to_string(MAX_MIB)});
}

// One bundle for all tests: making it takes seconds.
class GpuBundle : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    made_ = new Outcome(make_bundle(bundle()));
  }
  static void TearDownTestSuite() {
    delete made_;
    delete folder_;
  }

  static std::string bundle() { return *folder_ / "bundle"; }
  static Outcome check(std::vector<std::string> arguments) {
    arguments.push_back(*folder_ / "out");
    return run_program(bundle() + "/gpu_check.sh", arguments);
  }

  static inline TempFolder* folder_ = nullptr;
  static inline Outcome* made_ = nullptr;
};

TEST_F(GpuBundle, IsMadeWithinItsLimit) {
  EXPECT_EQ(made_->exit_code, 0) << made_->out << made_->err;
  for (const char* file :
       {"gpu_check.sh", "tools/programs/train_mlp", "tools/programs/train_transformer",
        "tools/bench/gpu/bench_gpu", "tools/bench/peers/torch_gpt.py", "lib/libstdc++.so.6",
        "third_party/data/kjv.txt", "tests/golden/gpu_check_losses.jsonl"}) {
    EXPECT_TRUE(fs::exists(fs::path(bundle()) / file)) << file;
  }
}

TEST_F(GpuBundle, HoldsTestsOfEveryLayer) {
  for (const char* test : {"engine/cuda_test", "engine/cuda_gemm_test", "ops/cuda_attention_test",
                           "shard/cuda_fsdp_test", "tools/train/cuda_train_test"}) {
    EXPECT_TRUE(fs::exists(fs::path(bundle()) / "tests" / test)) << test;
  }
  EXPECT_FALSE(fs::exists(fs::path(bundle()) / "tests/engine/gemm_test")) << "not of a GPU";
}

TEST_F(GpuBundle, OverwritesNothing) {
  const TempFolder taken;
  taken.write("mine", "");
  const Outcome outcome = make_bundle(taken.path());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected an empty folder"})) << outcome.err;
  EXPECT_EQ(taken.num_entries(), 1);
}

TEST_F(GpuBundle, ChecksTheLossesThatTheCpuHasNow) {
  const Outcome outcome = check({"--device=cpu"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_TRUE(outcome.out.ends_with("\n4 passed, 0 failed\n")) << outcome.out;
}

TEST_F(GpuBundle, SaysWhichLossesAreOff) {
  const std::string golden = bundle() + "/tests/golden/gpu_check_losses.jsonl";
  const TempFolder kept;
  fs::copy_file(golden, kept / "golden");
  fs::permissions(golden, fs::perms::owner_write, fs::perm_options::add);
  std::string text = kept.read("golden");
  const std::size_t first = text.find("\"loss\":[") + 8;
  text[first] = text[first] == '9' ? '8' : '9';
  std::ofstream(golden) << text;
  const Outcome outcome = check({"--device=cpu"});
  fs::copy_file(kept / "golden", golden, fs::copy_options::overwrite_existing);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(outcome.out.ends_with("\n3 passed, 1 failed\n")) << outcome.out << outcome.err;
}

TEST_F(GpuBundle, RefusesOptionsItDoesNotKnow) {
  for (const char* option : {"--budget=soon", "--parts=tests,tea", "--plan=4", "--fast"}) {
    const Outcome outcome = check({option});
    EXPECT_EQ(outcome.exit_code, 2) << option;
    EXPECT_TRUE(has(outcome.err, {"expected"})) << option << outcome.err;
  }
}

TEST_F(GpuBundle, SaysThatThereIsNoGpu) {
  // The GPUs of a machine that has some are hidden from it.
  const Outcome outcome =
      run_program(bundle() + "/gpu_check.sh", std::vector<std::string>{*folder_ / "out"},
                  {{"CUDA_VISIBLE_DEVICES", ""}});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(has(outcome.err, {"gpu_check: expected"})) << outcome.out << outcome.err;
}

}  // namespace
}  // namespace tessera
