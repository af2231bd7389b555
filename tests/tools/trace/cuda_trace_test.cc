// A trace of a training on a GPU, from its events.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/trace/trace_file.h"

namespace tessera::testing {
namespace {

class CudaTrace : public TinyTraining {
 protected:
  CudaTrace() {
    flags_["train.steps"] = "8";
    flags_["device"] = "cuda";
    flags_["parallel.backend"] = "threads";
    flags_["log.trace"] = folder_ / "trace.json";
    flags_["log.trace_steps"] = "4:6";
  }
};

TEST_F(CudaTrace, ShowsWhatTheHostLaunchedAStepEarlier) {
  for (const Flags& more : std::vector<Flags>{{},
                                              {{"parallel.strategy", "ddp"}},
                                              {{"offload.parameters", "0.5"},
                                               {"offload.gradients", "0.5"},
                                               {"offload.optimizer", "0.5"},
                                               {"offload.threads", "2"}}}) {
    const Outcome outcome = run(more);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    // A GPU's clock is known as well as the machine lets a thread run.
    const TraceFile file(folder_.read("trace.json"), /*slack_ns=*/1'000'000'000);
    file.expect_threads_in_turn();
    EXPECT_EQ(file.processes.size(), 2u);
    std::set<std::string> threads;
    for (const auto& [id, name] : file.threads) threads.insert(name);
    for (const char* name : {"compute", "reduce", "metrics", "loader"}) {
      EXPECT_TRUE(threads.contains(name)) << name;
    }
    if (more.contains("offload.parameters")) {
      for (const char* name : {"fetch", "sums down", "host", "host 1"}) {
        EXPECT_TRUE(threads.contains(name)) << name;
      }
    }
    std::map<std::string, int> steps, arrows;
    for (const TraceSlice& s : file.of_category("step")) ++steps[s.name];
    EXPECT_EQ(steps, (std::map<std::string, int>{{"step 4", 2}, {"step 5", 2}, {"step 6", 2}}));
    for (const TraceFile::Arrow& arrow : file.arrows) ++arrows[arrow.name];
    EXPECT_EQ(arrows["gradient"], 2 * 3 * 3);
    EXPECT_EQ(arrows["gathered"], more.contains("parallel.strategy") ? 0 : 2 * (3 * 4 - 2));
    // As many of every launch in each step.
    std::map<std::string, int> launches;
    for (const TraceSlice& s : file.slices) {
      if (s.args.contains("op") && s.arg("op") != "all_gather") ++launches[s.name];
    }
    for (const auto& [name, count] : launches) EXPECT_EQ(count % 6, 0) << name << " " << count;
  }
}

}  // namespace
}  // namespace tessera::testing
