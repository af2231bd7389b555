// Each instruction set computes the same.
#include "engine/isa.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tools/launch/cpu_wishes.h"
#include "tools/machine/environment.h"

namespace tessera::engine {
namespace {

// A loop of every kind of arithmetic that kernels use.
void compute(std::vector<float>& y, const std::vector<float>& x) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = std::fma(x[i], 1.7f, y[i]) * x[i] + x[i] / (1 + std::sqrt(std::fabs(y[i])));
  }
}

// As of every test: without it .ci/run cpus would test the same set several times.
TEST(IsaTest, IsTheOneThatTheEnvironmentAsksFor) {
  const auto asked = tools::CpuWishes::of(tools::environment()).choice().isa;
  EXPECT_EQ(isa(), asked.value_or(best_isa()));
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
