// What a process uses of its CPU, with and without a call. Each choice is one of a process of its
// own.
#include "engine/cpu_choice.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <string>

#include "engine/gemm/gemm.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

constexpr CpuChoice::Names kNames{
    .isa = "my.isa", .gemm = "my.gemm", .threads_per_product = "my.threads"};

std::string isa_text() { return std::string(name_of(isa())); }

// Says what `tell` finds after the choice, and after it again; or the error.
[[noreturn]] void choose(const CpuChoice& choice, const std::function<std::string()>& tell) {
  testing::say_and_exit([&] {
    choose_cpu(choice);
    const std::string first = tell();
    choose_cpu(choice);
    return first == tell() ? first : "changed";
  });
}

// Something computes by default, then `choice` is made.
[[noreturn]] void choose_late(CpuChoice choice) {
  choice.names = kNames;
  testing::say_and_exit([&] {
    const std::string before = isa_text() + gemm_library();
    choose_cpu(choice);
    return before == isa_text() + gemm_library() ? "as before" : "changed";
  });
}

class CpuChoiceDeathTest : public ::testing::Test {
 protected:
  CpuChoiceDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  const ::testing::ExitedWithCode ends_{0};
};

TEST_F(CpuChoiceDeathTest, WithoutACallItIsTheBestThereIs) {
  std::string best = "v2", flags;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, flags) && !flags.starts_with("flags")) {
  }
  flags += ' ';
  const auto has = [&](const char* flag) { return flags.find(flag) != std::string::npos; };
  if (has(" avx2 ")) best = "v3";
  if (has(" avx512bw ") && has(" avx512vl ")) best = "v4";
  if (best == "v4" && has(" avx512_bf16 ")) best = "v4\\+bf16";
  if (best == "v4\\+bf16" && has(" amx_bf16 ")) best = "v4\\+amx";
  EXPECT_EXIT(choose({}, isa_text), ends_, "\\[" + best + "\\]");
  EXPECT_EXIT(choose({}, gemm_library), ends_, "\\[(oneDNN|Eigen) [0-9.]+\\]");
  EXPECT_EXIT(choose({}, [] { return std::to_string(threads_per_product()); }), ends_, "\\[1\\]");
}

TEST_F(CpuChoiceDeathTest, TheEnvironmentIsNotRead) {
  const auto with_variables = [] {
    setenv("TESSERA_CPU_ISA", "v9", 1);
    setenv("TESSERA_CPU_GEMM", "mkl", 1);
    setenv("TESSERA_CPU_THREADS", "0", 1);
    choose({}, [] { return gemm_library() + (isa() == best_isa() ? ", best" : ", less"); });
  };
  EXPECT_EXIT(with_variables(), ends_, "\\[(oneDNN|Eigen) [0-9.]+, best\\]");
}

TEST_F(CpuChoiceDeathTest, ACallLowersTheLevel) {
  EXPECT_EXIT(choose({.isa = Isa::kV2}, isa_text), ends_, "\\[v2\\]");
  if (best_isa() >= Isa::kV4) return;
  EXPECT_EXIT(choose({.isa = Isa::kV4, .names = kNames}, isa_text), ends_,
              "expected at most v[23], which this CPU has, got v4 \\(my.isa\\)");
}

TEST_F(CpuChoiceDeathTest, ACallSaysWhoMultiplies) {
  const auto gemm = [](CpuGemm who, std::optional<int> threads = {}) {
    choose({.gemm = who, .threads_per_product = threads, .names = kNames}, gemm_library);
  };
  const std::string tiles =
      "expected a CPU with AMX .* got v.* \\(my.gemm\\)|expected Linux .* \\(my.gemm\\)";
  EXPECT_EXIT(gemm(CpuGemm::kEigen), ends_, "\\[Eigen 3\\.");
  EXPECT_EXIT(gemm(CpuGemm::kOneDnn, 2), ends_,
              "\\[oneDNN 2\\.|expected libdnnl.so.2, got none .*\\(my.gemm\\)");
  EXPECT_EXIT(gemm(CpuGemm::kSplit), ends_, "\\[.*, f32 split\\]|" + tiles);
  EXPECT_EXIT(gemm(CpuGemm::kSplit, 2), ends_,
              "expected 1 thread for products that are split, got 2 \\(my.threads\\)|" + tiles);
  EXPECT_EXIT(gemm(CpuGemm::kSplitPortable), ends_, "\\[.*, f32 split without tiles\\]");
  EXPECT_EXIT(gemm(CpuGemm::kSplitPortable, 2), ends_,
              "expected 1 thread for products that are split, got 2 \\(my.threads\\)");
  EXPECT_EXIT(gemm(CpuGemm::kEigen, 2), ends_,
              "expected oneDNN for products of 2 threads, got Eigen \\(my.threads\\)");
  for (const int threads : {0, -1, 99999}) {
    EXPECT_EXIT(gemm(CpuGemm::kOneDnn, threads), ends_,
                "threads from 1 to 1024, got " + std::to_string(threads) + " \\(my.threads\\)");
  }
}

TEST_F(CpuChoiceDeathTest, OnceSomethingComputesAnotherChoiceIsRefused) {
  EXPECT_EXIT(choose_late({}), ends_, "\\[as before\\]");
  EXPECT_EXIT(choose_late({.isa = best_isa(), .threads_per_product = 1}), ends_, "\\[as before\\]");
  if (best_isa() > Isa::kV2) {
    EXPECT_EXIT(choose_late({.isa = Isa::kV2}), ends_,
                "expected to choose before anything is computed, got v2 while v.* is in use "
                "\\(my.isa\\)");
  }
  EXPECT_EXIT(choose_late({.gemm = CpuGemm::kEigen}), ends_,
              "got eigen while auto is in use \\(my.gemm\\)");
  EXPECT_EXIT(choose_late({.threads_per_product = 2}), ends_,
              "got 2 while 1 is in use \\(my.threads\\)");
}

}  // namespace
}  // namespace tessera::engine
