// What a resumed run says of other data and other arithmetic than those that it began with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/mlp_run.h"
#include "tests/tools/testing/tiny_images.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::Flags;
using testing::has;
using testing::MlpTraining;
using testing::Outcome;
using testing::TempFolder;
using tools::RunIdentity;

/// What the terminal shows of a run as `now` that goes on from one as `before`.
std::string resumed(const RunIdentity& before, const RunIdentity& now) {
  const TempFolder folder;
  MlpTraining training{.step = {.steps = 1, .schedule = tools::ScheduleKind::kConstant},
                       .identity = before};
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(testing::train_mlp(folder, training).error, "");
  training.step.steps = 2;
  training.identity = now;
  training.resumes = true;
  EXPECT_EQ(testing::train_mlp(folder, training).error, "");
  const std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(out, {"resumed after step 1"}));
  return out;
}

TEST(RunIdentity, DataAreKnownByWhatTheyAreAndWithoutADigestByTheirName) {
  const auto data = [](const std::string& name, const std::string& digest) {
    return RunIdentity{.model = "mlp", .data = name, .config = "", .data_digest = digest};
  };
  const struct {
    RunIdentity before, now;
    std::string warning;
  } cases[] = {
      {data("9 from a", "1"), data("9 from a", "1"), ""},
      {data("9 from a", "1"), data("9 from b", "1"), ""},
      {data("9 from a", "1"), data("9 from a", "2"),
       "warning: other data: 9 from a has changed since the checkpoint was saved\n"},
      {data("9 from a", "1"), data("8 from b", "2"),
       "warning: other data: 8 from b (was 9 from a)\n"},
      // Of a checkpoint without a digest.
      {data("9 from a", ""), data("9 from a", "1"), ""},
      {data("9 from a", ""), data("9 from b", "1"),
       "warning: other data: 9 from b (was 9 from a)\n"},
  };
  for (const auto& c : cases) {
    const std::string out = resumed(c.before, c.now);
    EXPECT_EQ(out.find("warning") != std::string::npos, !c.warning.empty()) << out;
    EXPECT_TRUE(has(out, {c.warning}));
  }
}

TEST(RunIdentity, ArithmeticIsToldAmongWhatHasChanged) {
  const auto with = [](const std::string& arithmetic, const std::string& config = "") {
    return RunIdentity{.model = "mlp", .data = "data", .config = config, .arithmetic = arithmetic};
  };
  const std::string before = "cpu = \"A\"\ncpu.isa = \"v4\"\ncpu.gemm = \"oneDNN 2.6.3\"\n";
  const std::string other_bits = "what follows has other bits than it would have had\n";
  const std::string other_cpu =
      resumed(with(before), with("cpu = \"B\"\ncpu.isa = \"v4\"\ncpu.gemm = \"oneDNN 2.6.3\"\n"));
  EXPECT_TRUE(has(other_cpu, {"  changed: cpu=\"B\" (was \"A\")\n", other_bits}));
  EXPECT_EQ(other_cpu.find("changed: cpu."), std::string::npos) << other_cpu;
  EXPECT_TRUE(has(resumed(with(before), with("cpu = \"A\"\ncpu.isa = \"v3\"\n"
                                             "cpu.gemm = \"Eigen 3.4.0\"\n")),
                  {"  changed: cpu.isa=\"v3\" (was \"v4\")\n",
                   "  changed: cpu.gemm=\"Eigen 3.4.0\" (was \"oneDNN 2.6.3\")\n", other_bits}));
  for (const auto& [a, b] : {std::pair{before, before}, {std::string(), before}}) {
    EXPECT_EQ(resumed(with(a), with(b)).find("changed"), std::string::npos);
  }
  // A path is no change of what is computed.
  const std::string paths = resumed(with("", "[data]\npath = \"a\"\norder = \"shuffle\"\n"),
                                    with("", "[data]\npath = \"b\"\norder = \"sequential\"\n"));
  EXPECT_TRUE(has(paths, {"  changed: data.order=\"sequential\" (was \"shuffle\")\n"}));
  EXPECT_EQ(paths.find("data.path"), std::string::npos) << paths;
  const std::string moved = "so a sample is another than it would have been";
  EXPECT_TRUE(has(paths, {moved}));
  const std::string settings =
      resumed(with("", "[train]\nlr = 0.1\nseed = 1\n[data]\npath = \"a\"\n"),
              with("", "[train]\nlr = 0.2\nseed = 1\n[data]\npath = \"b\"\n"));
  EXPECT_TRUE(has(settings, {"  changed: train.lr=0.2 (was 0.1)\n"}));
  EXPECT_EQ(settings.find(moved), std::string::npos) << settings;
  EXPECT_TRUE(
      has(resumed(with("", "[data]\npacking = false\n"), with("", "[data]\npacking = true\n")),
          {"  changed: data.packing=true (was false)\n", moved}));
}

// Programs ---------------------------------------------------------------------------------------

/// What is said when a run of `program` goes on after `change`.
class Programs : public testing::TinyTraining {
 protected:
  std::string changed(const std::string& program, Flags flags,
                      const std::function<void(Flags&)>& change) const {
    fs::remove_all(folder_ / "run");
    flags["checkpoint.every"] = "2";
    flags["train.schedule"] = "constant";
    flags["train.warmup"] = "0";
    flags["train.steps"] = "2";
    const Outcome before = testing::run_program(program, flags);
    EXPECT_EQ(before.exit_code, 0) << before.err;
    flags["train.steps"] = "4";
    flags["resume"] = "auto";
    change(flags);
    const Outcome now = testing::run_program(program, flags);
    EXPECT_EQ(now.exit_code, 0) << now.err;
    EXPECT_TRUE(has(now.out, {"resumed after step 2"}));
    return now.out;
  }
  void write_images(const std::string& name, std::uint8_t last_pixel) const {
    testing::Images images;
    for (int i = 0; i < 8; ++i) images.add(i == 7 ? last_pixel : 'x', i);
    for (const std::string part : {"train", "t10k"}) images.write(folder_, name + "/" + part);
  }
};

TEST_F(Programs, TokensThatChangedUnderTheirPathAreToldAndThoseOfAnotherPathAreNot) {
  const std::string text = folder_.read("text.txt");
  std::string swapped = text;
  std::swap(swapped.front(), swapped.back());
  const auto in_bin = [](const std::string& bytes) {  // nanoGPT's
    std::string tokens;
    for (const char c : bytes) tokens += {c, '\0'};
    return tokens;
  };
  for (const std::string ending : {".txt", ".bin"}) {
    const auto in_file = [&](const std::string& bytes) {
      return ending == ".bin" ? in_bin(bytes) : bytes;
    };
    const std::string path = folder_.write("data" + ending, in_file(text));
    const std::string copy = folder_.write("copy" + ending, in_file(text));
    const Flags flags = with({{"data.path", path}});
    EXPECT_EQ(changed(testing::kTransformer, flags, [](Flags&) {}).find("warning"),
              std::string::npos);
    const std::string moved =
        changed(testing::kTransformer, flags, [&](Flags& f) { f["data.path"] = copy; });
    EXPECT_EQ(moved.find("warning"), std::string::npos) << moved;
    EXPECT_EQ(moved.find("data.path"), std::string::npos) << moved;
    EXPECT_TRUE(has(changed(testing::kTransformer, flags,
                            [&](Flags&) { folder_.write("data" + ending, in_file(swapped)); }),
                    {"warning: other data: ", "data" + ending,
                     " has changed since the checkpoint was saved\n"}));
  }
  // In another format they are the same.
  folder_.write("data.txt", text);
  folder_.write("data.bin", in_bin(text));
  EXPECT_EQ(changed(testing::kTransformer, with({{"data.path", folder_ / "data.txt"}}),
                    [&](Flags& f) { f["data.path"] = folder_ / "data.bin"; })
                .find("warning"),
            std::string::npos);
}

TEST_F(Programs, ImagesThatChangedAreTold) {
  for (const char* name : {"data", "copy"}) {
    fs::create_directory(folder_ / name);
    write_images(name, 'x');
  }
  const Flags flags = {{"data.path", folder_ / "data"},
                       {"model.hidden", "8"},
                       {"parallel.ranks", "2"},
                       {"train.batch", "1"},
                       {"device", "cpu"},
                       {"log.every", "0"},
                       {"log.peak_ms", "0"},
                       {"out", folder_ / "run"}};
  EXPECT_EQ(changed(testing::kMlp, flags, [&](Flags& f) { f["data.path"] = folder_ / "copy"; })
                .find("warning"),
            std::string::npos);
  EXPECT_TRUE(has(changed(testing::kMlp, flags, [&](Flags&) { write_images("data", 'y'); }),
                  {"warning: other data: 8 images of 2 x 2 from ", "data has changed since"}));
}

// What the machine at hand can do otherwise: with a library of products, or without it; with its
// own instruction set, or the first one.
TEST_F(Programs, AnotherLibraryOrInstructionSetIsTold) {
  const auto device_of = [](const std::string& out) {
    const std::size_t at = out.find("\ndevice: ");
    return out.substr(at, out.find('\n', at + 1) - at);
  };
  const std::string own = device_of(run({}).out);
  const Flags another = {{"cpu.gemm", "eigen"}, {"cpu.isa", "v2"}};
  for (const auto& flag : another) {
    const bool differs = device_of(run({flag}).out) != own;
    const std::string out =
        changed(testing::kTransformer, with({}), [&](Flags& f) { f[flag.first] = flag.second; });
    EXPECT_EQ(out.find("  changed: " + flag.first + "=\"") != std::string::npos, differs) << out;
    EXPECT_EQ(out.find("other bits") != std::string::npos, differs) << out;
  }
}

}  // namespace
}  // namespace tessera
