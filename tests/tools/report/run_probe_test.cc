// What becomes of a run's checksums: when it goes wrong within a step, and when there are too many.
#include "tools/report/run_probe.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "comm/threads.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/config/train_config.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {
namespace {

using engine::Tensor;
using testing::error_of;
using testing::has;
using testing::TempFolder;

class RunProbeTest : public ::testing::Test {
 protected:
  RunProbeTest() {
    config_.train.steps = 5;
    config_.log.probe = path_;
  }

  // A step of one rank, without its end.
  void begin(RunProbe& run, int rank, std::int64_t step) {
    Probe& probe = run.probe(rank);
    probe.begin_step(step);
    probe.begin_micro_step(0);
    const std::vector<float> values = {1, static_cast<float>(step)};
    probe.on_output(block_, 0, Tensor::from<float>(memory_, {2}, values, "y"), "forward");
  }
  void start_after(RunProbe& run, std::int64_t step) const {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      run.start_after(step, world, engine::Stream::inline_cpu("compute"));
    });
  }
  std::map<std::int64_t, int> parts_by_step() const {
    std::map<std::int64_t, int> count;
    for (const ProbePart& part : read_probe_run(path_).parts) ++count[part.key.step];
    return count;
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "probe.jsonl";
  const engine::Memory memory_;
  engine::Block block_{"h.0", {}};
  TrainConfig config_;
};

using Counts = std::map<std::int64_t, int>;

TEST_F(RunProbeTest, TheStepThatGoesWrongIsInTheRecord) {
  RunProbe run(config_, {2}, "{}");
  for (const int rank : {0, 1}) {
    begin(run, rank, 1);
    run.probe(rank).end_step();
  }
  begin(run, 0, 2);
  run.probe(0).end_step();
  begin(run, 1, 2);  // which throws
  run.keep();
  const ProbeRun record = read_probe_run(path_);
  EXPECT_EQ(record.last_step, 2);
  EXPECT_TRUE(record.is_unfinished);
  EXPECT_EQ(parts_by_step(), (Counts{{1, 2}, {2, 2}}));
}

TEST_F(RunProbeTest, AStepThatNoRankHasAPartOfIsNotCounted) {
  RunProbe run(config_, {2}, "{}");
  for (const int rank : {0, 1}) {
    begin(run, rank, 1);
    run.probe(rank).end_step();
    run.probe(rank).begin_step(2);
  }
  run.keep();
  EXPECT_FALSE(read_probe_run(path_).is_unfinished);
  EXPECT_EQ(parts_by_step(), (Counts{{1, 2}}));
}

TEST_F(RunProbeTest, TheFirstStepMayGoWrong) {
  RunProbe run(config_, {2}, "{}");
  begin(run, 1, 1);
  run.keep();
  EXPECT_EQ(parts_by_step(), (Counts{{1, 1}}));
  EXPECT_EQ(read_probe_run(path_).last_step, 1);
}

TEST_F(RunProbeTest, WithoutAnyStepAnOlderRecordStays) {
  folder_.write("probe.jsonl", "older");
  {
    RunProbe run(config_, {2}, "{}");
    run.keep();
  }
  EXPECT_EQ(folder_.read("probe.jsonl"), "older");
}

TEST_F(RunProbeTest, OfARunThatWasResumedBeginsWhereItDid) {
  RunProbe run(config_, {2}, "{}");
  start_after(run, 3);
  const auto make = [&](int rank, std::int64_t step) {
    begin(run, rank, step);
    run.probe(rank).end_step();
  };
  make(0, 4);
  start_after(run, 3);  // the other rank comes later
  make(0, 5);
  make(1, 4);
  make(1, 5);
  run.commit();
  EXPECT_TRUE(has(run.summary(), {"checksums of steps 4 to 5"}));
  const ProbeRun record = read_probe_run(path_);
  EXPECT_EQ(record.header.first_step, 4);
  EXPECT_EQ(record.last_step, 5);
  EXPECT_EQ(parts_by_step(), (Counts{{4, 2}, {5, 2}}));
}

TEST_F(RunProbeTest, SaysWhyThereIsNone) {
  folder_.write("probe.jsonl", "older");
  config_.log.probe_steps = "2:3";
  const auto why = [&](std::int64_t start) {
    RunProbe run(config_, {1}, "{}");
    start_after(run, start);
    run.commit();
    return run.summary();
  };
  EXPECT_TRUE(has(why(0), {"not written, as the run ended before the end of step 2"}));
  EXPECT_TRUE(has(why(2), {"not written, as the run ended before the end of step 3"}));
  EXPECT_TRUE(has(why(4), {"not written, as the run went on after step 4 and the steps to "
                           "record end with 3"}));
  config_.log.probe_steps = "auto";
  EXPECT_TRUE(has(why(5), {"went on after step 5 and the steps to record end with 5"}));
  EXPECT_EQ(folder_.read("probe.jsonl"), "older");
}

// Reading refuses what is longer: so it is not written either.
TEST_F(RunProbeTest, ARecordThatIsTooLongIsRefusedWhenItIsWritten) {
  folder_.write("probe.jsonl", "older");
  RunProbe run(config_, {1}, "{}", /*max_nbytes=*/1000);
  for (std::int64_t step = 1; step <= 5; ++step) {
    begin(run, 0, step);
    run.probe(0).end_step();
  }
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { run.commit(); }),
                  {"[probe]", "at most 1,000 bytes", "log.probe_steps", path_}));
  EXPECT_EQ(folder_.read("probe.jsonl"), "older");
}

TEST_F(RunProbeTest, ARecordOfTheLargestLengthIsWritten) {
  const auto written = [&](std::int64_t max_nbytes) {
    RunProbe run(config_, {1}, "{}", max_nbytes);
    begin(run, 0, 1);
    run.probe(0).end_step();
    run.commit();
    return static_cast<std::int64_t>(std::filesystem::file_size(path_));
  };
  const std::int64_t nbytes = written(kMaxProbeNbytes);
  EXPECT_LE(written(nbytes + 256), nbytes + 256);
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { written(nbytes - 1); }), {"[probe]"}));
}

TEST_F(RunProbeTest, PathsOfInputsAreThoseOfTheFilesTheyLeadTo) {
  folder_.write("text.txt", "a");
  std::filesystem::create_directories(folder_ / "sub");
  std::filesystem::create_symlink(folder_ / "text.txt", folder_ / "link.txt");
  const auto recorded = [&](const std::string& name) {
    return probe_header(config_, 1, R"({"data.path":")" + (folder_ / name) + R"(","out":"a/./b"})")
        .options;
  };
  for (const char* name : {"sub/../text.txt", "./text.txt", "sub/..//link.txt"}) {
    EXPECT_EQ(recorded(name), recorded("text.txt")) << name;
  }
  EXPECT_NE(recorded("other.txt"), recorded("text.txt"));
  EXPECT_EQ(recorded("text.txt").at("out"), R"("a/./b")");
  const auto option = [&](const std::string& name, const std::string& text) {
    return probe_header(config_, 1, R"({")" + name + R"(":")" + text + R"("})").options.at(name);
  };
  const std::string text = folder_ / "text.txt", sub = folder_ / "sub";
  for (const char* name : {"data.path", "data.mix", "data.tokenizer", "init.from", "lora.from"}) {
    EXPECT_EQ(option(name, ""), R"("")") << name;
  }
  for (const char* name : {"data.tokenizer", "init.from", "lora.from"}) {
    EXPECT_EQ(option(name, sub + "/../sub"), option(name, sub)) << name;
    EXPECT_NE(option(name, text), option(name, sub)) << name;
  }
  // Of a mix each, and its weight as a number.
  EXPECT_EQ(option("data.mix", sub + "/../text.txt:1.0," + sub + "/./a.bin:2"),
            option("data.mix", text + ":1," + sub + "/a.bin:2"));
  EXPECT_NE(option("data.mix", text + ":1," + sub + "/a.bin:2"),
            option("data.mix", text + ":2," + sub + "/a.bin:2"));
}

}  // namespace
}  // namespace tessera::tools
