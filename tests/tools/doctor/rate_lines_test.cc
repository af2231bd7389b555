// Figures that the doctor prints, read back.
#include "tools/doctor/rate_lines.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/testing/errors.h"
#include "tools/rates/machine_rates.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::has;

json facts_of(const Check& check) {
  return testing::parse_json(json_of({check})).at("checks").at(0);
}

TEST(RateLines, AProductIsComparedWithThePeak) {
  const Check check = product_line(90, 120, 250);
  EXPECT_EQ(check.found,
            "values right; one thread: 90 GFLOP/s in f32, 75 % of the 120 that it reaches in "
            "registers; 250 GFLOP/s in bf16");
  EXPECT_EQ(check.verdict, Verdict::kOk);
  EXPECT_EQ(facts_of(check).at("gflop_per_s"), 90);
  EXPECT_EQ(facts_of(check).at("peak_gflop_per_s"), 120);
  EXPECT_EQ(facts_of(check).at("bf16_gflop_per_s"), 250);
  EXPECT_EQ(product_line(60, 120, 250).verdict, Verdict::kOk) << "half";
  EXPECT_EQ(product_line(59, 120, 250).verdict, Verdict::kWarn);
}

TEST(RateLines, NoProductHasMoreThanItsPeak) {
  EXPECT_TRUE(has(product_line(120, 120, 250).found, {"100 % of the 120 that it reaches in"}));
  const Check check = product_line(121, 120, 250);
  EXPECT_EQ(check.found,
            "values right; one thread: 121 GFLOP/s in f32; 250 GFLOP/s in bf16; what it reaches in "
            "registers is not known, as other programs ran while it was measured");
  EXPECT_EQ(check.verdict, Verdict::kOk);
  EXPECT_EQ(facts_of(check).at("gflop_per_s"), 121);
  EXPECT_FALSE(facts_of(check).contains("peak_gflop_per_s"));
}

TEST(RateLines, ACollectiveIsComparedWithACopy) {
  // 12 MB in 4 ms are 3 GB/s; a copy of it took 3 ms.
  const Check check = collective_line(
      {.name = "all_gather", .num_ranks = 3, .nbytes = 12e6, .ms = 4, .copy_ms = 3}, false);
  EXPECT_EQ(check.name, "all_gather");
  EXPECT_EQ(check.found,
            "3 thread ranks: values right, 3.0 GB/s a rank, 0.75 of memcpy by as many threads");
  EXPECT_EQ(check.verdict, Verdict::kOk);
  EXPECT_EQ(facts_of(check).at("ranks"), 3);
  EXPECT_DOUBLE_EQ(facts_of(check).at("gb_per_s").get<double>(), 3);
  EXPECT_DOUBLE_EQ(facts_of(check).at("ratio_to_memcpy").get<double>(), 0.75);
  const auto verdict = [](double ms, double copy_ms, bool on_gpus) {
    return collective_line({.name = "x", .num_ranks = 2, .nbytes = 1, .ms = ms, .copy_ms = copy_ms},
                           on_gpus)
        .verdict;
  };
  EXPECT_EQ(verdict(4, 1, false), Verdict::kOk);
  EXPECT_EQ(verdict(4.1, 1, false), Verdict::kWarn);
  EXPECT_EQ(verdict(500, 1, true), Verdict::kOk);
  EXPECT_EQ(verdict(501, 1, true), Verdict::kWarn);
  const Check gpus = collective_line(
      {.name = "all_gather", .num_ranks = 2, .nbytes = 8e9, .ms = 40, .copy_ms = 8}, true);
  EXPECT_EQ(gpus.name, "gpu all_gather");
  EXPECT_EQ(gpus.found,
            "2 GPUs over NCCL: values right, 200.0 GB/s a rank, 0.20 of a copy inside each");
}

TEST(RateLines, RatesAreThoseThatPlanTakes) {
  const engine::MetaRates rates{.flops_per_s = 143.4e9,
                                .bytes_per_s = 11.26e9,
                                .link_bytes_per_s = 4.712e9,
                                .link_latency_s = 21.37e-6,
                                .host_link_bytes_per_s = 0,
                                .host_bytes_per_s = 13.19e9};
  const Check check = rates_line(2, rates);
  EXPECT_EQ(check.found, "for plan, 2 ranks at once in f32: " + rates_flags(rates));
  EXPECT_EQ(facts_of(check).at("ranks"), 2);
  EXPECT_DOUBLE_EQ(facts_of(check).at("gflops").get<double>(), 143.4);
  EXPECT_DOUBLE_EQ(facts_of(check).at("memory_gbs").get<double>(), 11.26);
  EXPECT_DOUBLE_EQ(facts_of(check).at("link_gbs").get<double>(), 4.712);
  EXPECT_DOUBLE_EQ(facts_of(check).at("link_latency_us").get<double>(), 21.37);
  EXPECT_DOUBLE_EQ(facts_of(check).at("host_memory_gbs").get<double>(), 13.19);
}

}  // namespace
}  // namespace tessera::tools
