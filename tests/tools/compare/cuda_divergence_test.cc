// compare --find-divergence on a GPU, which the probes wait for.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera::testing {
namespace {

using nlohmann::json;

class CudaDivergence : public TinyTraining {
 protected:
  Outcome find(const std::string& a, const std::string& b) const {
    std::vector<std::string> arguments;
    const Flags flags = with({{"device", "cuda"}, {"parallel.backend", "threads"}});
    for (const auto& [name, value] : flags) arguments.push_back("--" + name + "=" + value);
    arguments.insert(arguments.end(), {"--find-divergence", a, b});
    return run_program("tools/compare/compare", arguments);
  }
};

TEST_F(CudaDivergence, StrategiesHaveEqualChecksums) {
  for (const char* other : {"zero3 parallel.ranks=1 train.accum=2", "zero1",
                            "zero3 offload.parameters=0.5 offload.gradients=0.5"}) {
    const Outcome outcome = find("ddp", other);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.out, {"Nothing differs: ", " checksums of steps 1 to 3 are equal."}));
    EXPECT_EQ(outcome.out.find("Not compared"), std::string::npos) << outcome.out;
  }
}

TEST_F(CudaDivergence, NamesTheFirstPhaseThatAnOptionReaches) {
  for (const auto& [option, phase] : std::vector<std::pair<std::string, std::string>>{
           {"precision.param=bf16", "gathered_forward"}, {"train.lr=0.5", "updated"}}) {
    EXPECT_EQ(find("zero3", option).exit_code, 1) << option;
    const json all = parse_json(folder_.read("run/divergence/divergence.json"));
    EXPECT_EQ(all.at("first").at("phase"), phase);
    EXPECT_GT(all.at("first").at("values").at("num_differing"), 0);
    EXPECT_TRUE(all.at("remark").is_null()) << all.at("remark");
  }
}

}  // namespace
}  // namespace tessera::testing
