// Which instruction set is chosen, and that each computes the same.
#include "engine/isa.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

// In a process of its own, as the choice is made once: says what is chosen.
[[noreturn]] void choose(const char* value) {
  setenv("TESSERA_CPU_ISA", value, 1);
  testing::say_and_exit([] {
    const Isa first = isa();
    setenv("TESSERA_CPU_ISA", "no level", 1);
    return first == isa() ? name_of(first) : "changed";
  });
}

class IsaDeathTest : public ::testing::Test {
 protected:
  IsaDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(IsaDeathTest, TheEnvironmentLowersTheLevel) {
  const ::testing::ExitedWithCode ends(0);
  EXPECT_EXIT(choose("v2"), ends, "\\[v2\\]");
  EXPECT_EXIT(choose("v5"), ends,
              "\\[cpu\\] expected auto, v2, v3, v4, v4\\+bf16 or v4\\+amx, got 'v5' "
              "\\(TESSERA_CPU_ISA\\)");
}

TEST_F(IsaDeathTest, WithoutAWishItIsTheBestThereIs) {
  const ::testing::ExitedWithCode ends(0);
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
  for (const char* wish : {"", "auto"}) EXPECT_EXIT(choose(wish), ends, "\\[" + best + "\\]");
  if (best.starts_with("v4")) return;
  EXPECT_EXIT(choose("v4"), ends, "expected at most " + best + ", which this CPU has, got v4");
}

// A loop of every kind of arithmetic that kernels use.
void compute(std::vector<float>& y, const std::vector<float>& x) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = std::fma(x[i], 1.7f, y[i]) * x[i] + x[i] / (1 + std::sqrt(std::fabs(y[i])));
  }
}

TEST(IsaTest, EveryLevelHasTheSameBits) {
  std::vector<float> x(1003), start(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(static_cast<float>(i)) * 3;
    start[i] = std::cos(static_cast<float>(i));
  }
  std::vector<float> base = start;
  compute(base, x);
  std::vector<float> mine = start;
  with_isa([&] { compute(mine, x); });
  EXPECT_EQ(mine, base);
#if defined(TESSERA_ISA_LEVELS)
  std::vector<float> y = start;
  auto run = [&] { compute(y, x); };
  if (isa() >= Isa::kV3) {
    internal::run_v3(run);
    EXPECT_EQ(y, base);
  }
  y = start;
  if (isa() >= Isa::kV4) {
    internal::run_v4(run);
    EXPECT_EQ(y, base);
  }
#endif
}

}  // namespace
}  // namespace tessera::engine
