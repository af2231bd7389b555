// A process that has some of a run's ranks: what is kept for each rank is kept for these alone.
#include "tools/report/local_ranks.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "engine/tensor.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/planned_gpt.h"
#include "tests/tools/trace/trace_file.h"
#include "tools/launch/ranks.h"
#include "tools/probe/probe_record.h"
#include "tools/programs/run/audit.h"
#include "tools/report/rank_errors.h"
#include "tools/report/run_probe.h"
#include "tools/report/run_trace.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;

class TwoOfFour : public ::testing::Test {
 protected:
  TwoOfFour() {
    config_.device = DeviceChoice::kCpu;
    config_.train.steps = 2;
    config_.log.trace = folder_ / "trace.json";
    config_.log.trace_steps = "1:2";
    config_.log.probe = folder_ / "probe.jsonl";
  }

  const testing::TempFolder folder_;
  const Ranks ranks_{.size = 4, .local = {.world_size = 4, .first = 2, .count = 2}};
  TrainConfig config_;
};

TEST_F(TwoOfFour, AreCountedFromTheFirst) {
  std::map<int, std::size_t> index;
  for (const int rank : ranks_.local.all()) index[rank] = ranks_.local.index(rank);
  EXPECT_EQ(index, (std::map<int, std::size_t>{{2, 0}, {3, 1}}));
  for (const int other : {-1, 0, 1, 4}) {
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { ranks_.local.index(other); }),
                    {"rank of this process, 2 to 3, got " + std::to_string(other)}));
  }
  EXPECT_EQ(Ranks{.size = 4}.local.index(3), 3u);
}

TEST_F(TwoOfFour, TakeGpusFromTheFirstOn) {
  const Ranks two{.size = 4, .num_gpus = 2, .local = {.world_size = 4, .first = 1, .count = 2}};
  EXPECT_EQ(two.gpu_of(1), 0);
  EXPECT_EQ(two.gpu_of(2), 1);
  EXPECT_THROW(static_cast<void>(two.gpu_of(3)), engine::InvalidArgument);
  EXPECT_EQ((Ranks{.size = 4, .num_gpus = 2}).gpu_of(3), 1);
  EXPECT_EQ((Ranks{.size = 4, .num_gpus = 1}).gpu_of(3), 0);
}

TEST_F(TwoOfFour, AreNotAllThatTakePart) {
  EXPECT_EQ(error_of<engine::InvalidArgument>(
                [&] { ranks_.run(config_, [](comm::ProcessGroup&) { FAIL() << "started"; }); }),
            "[ranks] expected all 4 ranks in this process, got 2");
}

TEST_F(TwoOfFour, AreInTheTrace) {
  RunTrace trace(config_, ranks_.local);
  for (const int rank : {3, 2}) {
    trace.start_after(0, rank);
    TraceRecorder& recorder = trace.recorder(rank);
    const engine::Stream stream = engine::Stream::inline_cpu("compute", {.listener = &recorder});
    recorder.begin_step(1);
    stream.launch({.name = "op"}, [] {});
    recorder.end_step();
  }
  trace.begin();
  trace.close();
  trace.flush();
  const testing::TraceFile file(folder_.read("trace.rank2.json"));
  std::set<std::string> processes, of_ops;
  for (const auto& [process, name] : file.processes) processes.insert(name);
  for (const testing::TraceSlice& slice : file.slices) {
    if (slice.name == "op") of_ops.insert(file.processes.at(slice.process));
  }
  EXPECT_EQ(processes, (std::set<std::string>{"rank 2", "rank 3"}));
  EXPECT_EQ(of_ops, processes);
  EXPECT_EQ(trace.summary().find("not written"), std::string::npos);
  EXPECT_THROW(trace.recorder(0), engine::InvalidArgument);
}

TEST_F(TwoOfFour, AreInTheProbesRecord) {
  const engine::Memory memory;
  engine::Block block{"h.0", {}};
  const LocalRanks others{.world_size = 4, .first = 0, .count = 2};
  for (const LocalRanks& local : {others, ranks_.local}) {
    RunProbe run(config_, local, "{}");
    for (const int rank : local.all()) {
      Probe& probe = run.probe(rank);
      probe.begin_step(1);
      probe.begin_micro_step(0);
      const std::vector<float> values = {1, static_cast<float>(rank)};
      probe.on_output(block, 0, engine::Tensor::from<float>(memory, {2}, values, "y"), "forward");
      probe.end_step();
    }
    run.commit();
    EXPECT_THROW(run.probe(local.first + 2), engine::InvalidArgument);
  }
  EXPECT_FALSE(has(folder_.read("probe.rank2.jsonl"), {"\"rank\":1"}));
  const ProbeRun record = read_probe_run(folder_ / "probe.jsonl");
  EXPECT_EQ(record.header.ranks, 4);
  EXPECT_EQ(record.last_step, 1);
  std::set<int> ranks;
  for (const ProbePart& part : record.parts) ranks.insert(part.rank);
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3}));
}

TEST_F(TwoOfFour, AreAudited) {
  const TrainConfig config = testing::base(4);
  const auto audited = [&](std::int64_t more_sent_by_3) {
    Audits audits(ranks_.local);
    for (const int rank : {3, 2}) {
      const TrainPlan plan = testing::plan_of(config, testing::kModel, rank);
      Audit& audit = audits.add(Audit(plan, {.num_ranks = 4, .rank = rank}, /*val_every=*/0));
      StepRecord step = plan.steps[0];
      step.step = 1;
      step.traffic.bytes_sent += rank == 3 ? more_sent_by_3 : 0;
      audit.add(step);
    }
    return audits;
  };
  const Audits equal = audited(0), different = audited(4);
  EXPECT_EQ(equal.first().rank(), 2);
  EXPECT_EQ(equal.shown().rank(), 2);
  EXPECT_EQ(equal.lines().back(), "1 step is as planned on each of 2 ranks");
  EXPECT_EQ(different.shown().rank(), 3);
  EXPECT_EQ(different.lines().back(), "step 1 is not as planned on rank 3");
}

TEST_F(TwoOfFour, AreNamedWithTheirError) {
  const auto named = [&](const std::set<int>& failing) {
    RankErrors errors(ranks_.local);
    for (const int rank : ranks_.local.all()) {
      try {
        errors.watch(rank, [&] {
          if (failing.contains(rank)) throw std::runtime_error("no data");
        });
      } catch (const std::runtime_error&) {
      }
    }
    return errors.named("no data");
  };
  EXPECT_EQ(named({3}), "rank 3: no data");
  EXPECT_EQ(named({2, 3}), "ranks 2-3: no data");
  EXPECT_EQ(named({}), "no data");
}

}  // namespace
}  // namespace tessera::tools
