// What a machine does in a second: rates that are possible, and options that plan takes. A peak
// that other programs held down is measured again.
#include <gtest/gtest.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "tools/rates/machine_rates.h"
#include "tools/rates/peak.h"

namespace tessera::tools {
namespace {

TEST(Rates, APeakThatIsTooLowIsMeasuredAgain) {
  const auto settled = [](std::vector<double> measured) {
    std::size_t at = 0;
    const double peak = settled_peak(100, [&] { return measured.at(at++); });
    return std::pair(peak, at);
  };
  EXPECT_EQ(settled({120, 1000}), std::pair(120.0, std::size_t{1})) << "as high as the product";
  EXPECT_EQ(settled({90, 80, 110, 1000}), std::pair(110.0, std::size_t{3}));
  EXPECT_EQ(settled({90, 95, 80, 70, 1000}), std::pair(95.0, std::size_t{4})) << "never so high";
}

TEST(Rates, AreTheOptionsOfPlan) {
  EXPECT_EQ(rates_flags({.flops_per_s = 143.4e9,
                         .bytes_per_s = 11.26e9,
                         .link_bytes_per_s = 4.712e9,
                         .link_latency_s = 21.37e-6,
                         .host_link_bytes_per_s = 0,
                         .host_bytes_per_s = 13.19e9}),
            "--rates.gflops=143 --rates.memory_gbs=11.3 --rates.link_gbs=4.71 "
            "--rates.link_latency_us=21.4 --rates.host_memory_gbs=13.2");
  EXPECT_EQ(rates_flags({.flops_per_s = 989.5e12,
                         .bytes_per_s = 2.5e12,
                         .link_bytes_per_s = 0,
                         .link_latency_s = 0,
                         .host_link_bytes_per_s = 54.31e9,
                         .host_bytes_per_s = 190.6e9}),
            "--rates.gflops=989500 --rates.memory_gbs=2500 --rates.host_link_gbs=54.3 "
            "--rates.host_memory_gbs=191");
}

// A rank among several that work at once has no more than all of them; who sends nothing has none.
TEST(Rates, AreMeasuredOfEachRank) {
  for (const int num_ranks : {2, 3}) {
    const engine::MetaRates rates = measure_rates(num_ranks, engine::DType::kF32);
    EXPECT_GT(rates.flops_per_s, 1e6);
    EXPECT_LT(rates.flops_per_s, 1e14);
    EXPECT_GT(rates.bytes_per_s, 1e6);
    EXPECT_LT(rates.bytes_per_s, 1e13);
    EXPECT_GT(rates.link_bytes_per_s, 1e5);
    EXPECT_LT(rates.link_bytes_per_s, 1e13);
    EXPECT_GT(rates.link_latency_s, 1e-8);
    EXPECT_LT(rates.link_latency_s, 10);
    EXPECT_EQ(rates.host_link_bytes_per_s, 0) << "no device";
    EXPECT_GT(rates.host_bytes_per_s, 1e6);
    EXPECT_LT(rates.host_bytes_per_s, 1e13);
  }
  EXPECT_EQ(num_rated_ranks(1), 2);
  EXPECT_EQ(num_rated_ranks(5), 5);
  EXPECT_EQ(num_rated_ranks(64), 8);
}

}  // namespace
}  // namespace tessera::tools
