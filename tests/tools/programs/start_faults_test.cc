// What a run may not touch before it has begun: its own input, what an earlier run wrote, and what
// another one is writing.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::below;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;
using testing::with_fault;

constexpr const char* kTransformer = "tools/programs/train_transformer";

class StartFaults : public ::testing::Test {
 protected:
  StartFaults() { folder_.write("book.txt", book_); }

  Flags flags(const Flags& more) const {
    Flags flags = {{"data.path", folder_ / "book.txt"},
                   {"out", folder_ / "run"},
                   {"model.layers", "1"},
                   {"model.heads", "2"},
                   {"model.dim", "8"},
                   {"model.seq", "8"},
                   {"train.steps", "2"},
                   {"train.batch", "1"},
                   {"parallel.ranks", "2"},
                   {"data.val_fraction", "0"},
                   {"log.every", "0"},
                   {"log.peak_ms", "0"},
                   {"sample.tokens", "0"},
                   {"device", "cpu"}};
    for (const auto& [name, value] : more) flags[name] = value;
    for (const std::string& name : without_) flags.erase(name);
    return flags;
  }
  Outcome run(const Flags& more = {}, const Flags& environment = {}) const {
    return run_program(kTransformer, flags(more), environment);
  }
  Outcome shell(const std::string& before, const Flags& more, const std::string& after) const {
    std::string line = before + kTransformer;
    for (const auto& [name, value] : flags(more)) line += " --" + name + "=" + value;
    return run_program("/bin/sh", std::vector<std::string>{"-c", line + after});
  }
  /// Refused for this pair of options, with nothing written.
  void expect_refused(const Flags& more, const std::string& output, const std::string& input) {
    const int before = folder_.num_entries();
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 1) << output << " " << input;
    EXPECT_TRUE(
        has(outcome.err, {"[config] expected " + output + " and " + input, folder_.path()}));
    EXPECT_EQ(folder_.read("book.txt"), book_);
    EXPECT_EQ(folder_.num_entries(), before);
  }
  /// Waits until there is a file; false after a minute.
  static bool appears(const std::string& path) {
    for (int i = 0; i < 6000 && !fs::exists(path); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return fs::exists(path);
  }
  int num_lines(const std::string& name) const {
    const std::string text = folder_.read(name);
    return static_cast<int>(std::ranges::count(text, '\n'));
  }

  const std::string book_ = std::string(400, 'a');
  const TempFolder folder_;
  std::vector<std::string> without_;
};

TEST_F(StartFaults, AnInputIsNoOutput) {
  const std::string book = folder_ / "book.txt";
  fs::create_symlink(book, folder_ / "symbolic");
  fs::create_hard_link(book, folder_ / "hard");
  for (const std::string name : {"book.txt", "./book.txt", "symbolic", "hard"}) {
    expect_refused({{"log.jsonl", folder_ / name}}, "log.jsonl", "data.path");
  }
  // A file below the output folder, made by hand, is refused too.
  for (const std::string name : {"log.jsonl", "config.toml", "sample.txt"}) {
    fs::remove_all(folder_ / "run");
    fs::create_directory(folder_ / "run");
    fs::create_symlink(book, folder_ / "run/" + name);
    expect_refused({}, "out", "data.path");
    fs::remove(folder_ / "run/" + name);
    fs::create_hard_link(book, folder_ / "run/" + name);
    expect_refused({}, "out", "data.path");
  }
  fs::remove_all(folder_ / "run");
  const std::string toml = folder_.write("a.toml", "train.lr = 0.01\n");
  expect_refused({{"config", toml}, {"log.jsonl", toml}}, "log.jsonl", "config");
  fs::create_directory(folder_ / "m");
  fs::create_symlink(book, folder_ / "m/model.safetensors");
  expect_refused({{"save.final", folder_ / "m"}}, "save.final", "data.path");
  fs::remove_all(folder_ / "m");
  fs::create_directory(folder_ / "m");
  expect_refused({{"save.final", folder_ / "m"}, {"log.jsonl", folder_ / "m/config.json"}},
                 "save.final", "log.jsonl");
  for (const std::string name : {"run/config.toml", "run/./config.toml", "m/../run/config.toml"}) {
    fs::remove_all(folder_ / "run");
    expect_refused({{"log.jsonl", folder_ / name}}, "log.jsonl", "out");
    fs::create_directory(folder_ / "run");
    expect_refused({{"log.jsonl", folder_ / name}}, "log.jsonl", "out");
  }
  EXPECT_EQ(folder_.read("a.toml"), "train.lr = 0.01\n");
}

TEST_F(StartFaults, ALockThatIsALinkIsRefused) {
  fs::create_directory(folder_ / "run");
  fs::create_symlink(folder_ / "book.txt", folder_ / "run/.lock");
  const Outcome outcome = run();
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected a folder that can be written to", folder_ / "run"}));
  EXPECT_EQ(folder_.read("book.txt"), book_);
}

TEST_F(StartFaults, TheLockOfARunIsNoOutput) {
  for (const char* option : {"log.probe", "log.trace", "log.jsonl"}) {
    for (const std::string name : {"run/.lock", "run/./.lock"}) {
      expect_refused({{option, folder_ / name}}, option, "the lock of out");
    }
  }
  ASSERT_EQ(run().exit_code, 0);
  for (const char* option : {"log.probe", "log.trace", "log.jsonl"}) {
    expect_refused({{option, folder_ / "run/.lock"}}, option, "the lock of out");
  }
  fs::create_symlink(folder_ / "run/.lock", folder_ / "symbolic");
  expect_refused({{"log.probe", folder_ / "symbolic"}}, "log.probe", "the lock of out");
}

TEST_F(StartFaults, AModelToStartFromIsNoOutput) {
  const Outcome first = run({{"save.final", folder_ / "m"}});
  ASSERT_EQ(first.exit_code, 0);
  EXPECT_FALSE(has(first.out, {"save.final"}));
  const std::string weights = folder_.read("m/model.safetensors");
  for (const std::string name : {"config.json", "model.safetensors"}) {
    expect_refused({{"init.from", folder_ / "m"}, {"log.jsonl", folder_ / "m/" + name}},
                   "log.jsonl", "init.from");
  }
  EXPECT_EQ(folder_.read("m/model.safetensors"), weights);
  // What is read before it is replaced as a whole may be both.
  const Outcome in_place = run({{"init.from", folder_ / "m"}, {"save.final", folder_ / "m"}});
  EXPECT_EQ(in_place.exit_code, 0) << in_place.err;
  EXPECT_TRUE(has(in_place.out, {"warning: save.final: what ", "/m has, config.json among it"}));
  EXPECT_NE(folder_.read("m/model.safetensors"), weights);
}

TEST_F(StartFaults, NothingThatOnlyAnEarlierRunHasToSayStays) {
  EXPECT_EQ(run({{"sample.tokens", "5"}, {"comm.hook", "bf16"}}).exit_code, 0);
  for (const char* name : {"run/sample.txt", "run/comm_hook.txt"}) {
    EXPECT_TRUE(fs::exists(folder_ / name)) << name;
  }
  EXPECT_EQ(run().exit_code, 0);
  for (const char* name : {"run/sample.txt", "run/comm_hook.txt"}) {
    EXPECT_FALSE(fs::exists(folder_ / name)) << name;
  }
}

TEST_F(StartFaults, AFileThatNoRunHasWrittenStays) {
  const std::string out = folder_ / "run";
  fs::create_directory(out);
  const std::pair<const char*, const char*> files[] = {
      {"config.toml", "[server]\nport = 80\n"},
      {"config.toml", "not toml"},
      {"config.toml", "device = \"cpu\"\n\n[train]\nlr = 0.1  # a person's own\n"},
      {"log.jsonl", "{\"event\":\"start\"}\n"},
      {"sample.txt", "a sample of something\n"},
      {"comm_hook.txt", "a hook of a door\n"},
      {"flight.json", "{\"flight\":1}\n"}};
  for (const auto& [name, text] : files) {
    const std::string path = folder_.write(std::string("run/") + name, text);
    for (int i = 0; i < 2; ++i) {  // the first leaves nothing that would help the second
      const Outcome outcome = run();
      EXPECT_EQ(outcome.exit_code, 1) << name;
      EXPECT_TRUE(has(outcome.err, {"[out] expected", "another --out", name}));
    }
    EXPECT_EQ(folder_.read(std::string("run/") + name), text);
    fs::remove(path);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(out), {}), 0);
  // A log of a name that was given is replaced, and so is all that a run has left.
  const std::string log = folder_.write("given.jsonl", "{}\n");
  EXPECT_EQ(run({{"log.jsonl", log}, {"sample.tokens", "3"}}).exit_code, 0);
  EXPECT_EQ(run().exit_code, 0);
  EXPECT_EQ(run().exit_code, 0);
}

TEST_F(StartFaults, AConfigOfAnotherProgramIsNotReplacedByAModel) {
  for (const std::string text : {"{\"port\":80}", "{\"model_type\":\"bert\"}", "[]", "none"}) {
    folder_.write("config.json", text);
    const Outcome outcome = run({{"save.final", folder_.path()}});
    EXPECT_EQ(outcome.exit_code, 1) << text;
    EXPECT_TRUE(has(outcome.err, {"no GPT-2 model", "config.json"}));
    EXPECT_EQ(folder_.read("config.json"), text);
  }
}

TEST_F(StartFaults, AnInputHasNoNameThatASaveUsesOnItsWay) {
  const std::string model = folder_ / "m";
  fs::create_directories(model);
  for (const char* name :
       {"config.json.replaced", "config.json.tmp-1-0", "model.safetensors.tmp-123-4"}) {
    const std::string data = folder_.write(std::string("m/") + name, book_);
    const Outcome outcome = run({{"data.path", data}, {"save.final", model}});
    EXPECT_EQ(outcome.exit_code, 1) << name;
    EXPECT_TRUE(has(outcome.err, {"[config]", "data.path", "save.final", name}));
    EXPECT_EQ(folder_.read(std::string("m/") + name), book_);
  }
}

TEST_F(StartFaults, ARunRepeatsFromItsOwnConfig) {
  ASSERT_EQ(run().exit_code, 0);
  const std::string config = folder_ / "run/config.toml", text = folder_.read("run/config.toml");
  const Outcome again = run_program(kTransformer, Flags{{"config", config}});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(folder_.read("run/config.toml"), text);
  // With other values the file that was given would be lost.
  const Outcome other = run_program(kTransformer, Flags{{"config", config}, {"train.steps", "1"}});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(has(other.err, {"[config] expected out and config", config}));
  EXPECT_EQ(folder_.read("run/config.toml"), text);
}

TEST_F(StartFaults, AConfigThatIsToBeReplacedIsNoInput) {
  ASSERT_EQ(run().exit_code, 0);
  const std::string text = folder_.read("run/config.toml"), given = folder_ / "run/sample.txt";
  folder_.write("run/sample.txt", text);
  const Outcome outcome = run_program(kTransformer, Flags{{"config", given}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"[config] expected out and config", given}));
  EXPECT_EQ(folder_.read("run/sample.txt"), text);
  // One that is longer than what would be written.
  folder_.write("run/config.toml", text + "# and more\n");
  const Outcome longer = run_program(kTransformer, Flags{{"config", folder_ / "run/config.toml"}});
  EXPECT_EQ(longer.exit_code, 1);
  EXPECT_TRUE(has(longer.err, {"[config] expected out and config"}));
}

TEST_F(StartFaults, ImagesAreNoOutput) {
  fs::copy(fs::canonical("third_party/data/fashion_mnist"), folder_ / "images");
  int num_images = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "images")) {
    const std::string path = entry.path().string();
    if (path.find("-ubyte") == std::string::npos) continue;
    const auto nbytes = fs::file_size(path);
    const Outcome outcome =
        run_program("tools/programs/train_mlp", Flags{{"data.path", folder_ / "images"},
                                                      {"log.jsonl", path},
                                                      {"out", folder_ / "mlp"},
                                                      {"train.steps", "1"}});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[config] expected log.jsonl and data.path", path}));
    EXPECT_EQ(fs::file_size(path), nbytes);
    ++num_images;
  }
  EXPECT_EQ(num_images, 4);
  EXPECT_FALSE(fs::exists(folder_ / "mlp"));
}

TEST_F(StartFaults, AStartThatFailsLeavesTheLastRunsFiles) {
  ASSERT_EQ(run().exit_code, 0);
  const std::string log = folder_.read("run/log.jsonl"), toml = folder_.read("run/config.toml");
  fs::create_directory(folder_ / "m");
  fs::copy(fs::canonical("tests/golden/gpt2_tiny/model.safetensors"),
           folder_ / "m/model.safetensors");
  std::ifstream golden("tests/golden/gpt2_tiny/config.json");
  std::stringstream config;
  config << golden.rdbuf();
  std::string text = config.str();
  text.replace(text.find("\"n_layer\": 2"), 12, "\"n_layer\": 3");
  folder_.write("m/config.json", text);
  without_ = {"model.layers", "model.heads", "model.dim"};
  const Outcome outcome = run({{"init.from", folder_ / "m"}, {"model.vocab", "307"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"is missing"}));
  EXPECT_EQ(folder_.read("run/log.jsonl"), log);
  EXPECT_EQ(folder_.read("run/config.toml"), toml);
  without_ = {};
  const Outcome full =
      run({{"train.steps", "1"}},
          with_fault({"rename", below(folder_, "run/config.toml"), 1, std::to_string(ENOSPC)}));
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_TRUE(has(full.err, {"run/config.toml", "No space left on device"}));
  EXPECT_EQ(folder_.read("run/log.jsonl"), log);
  EXPECT_EQ(folder_.read("run/config.toml"), toml);
  ASSERT_EQ(run({{"train.steps", "1"}}).exit_code, 0);
  EXPECT_EQ(num_lines("run/log.jsonl"), 2) << "not the last run's log alone";
}

TEST_F(StartFaults, TwoRunsAtOnceIntoOneFolderOrLogAreRefused) {
  const std::string paused = folder_ / "paused";
  auto first = std::async(std::launch::async, [&] {
    return run({{"log.jsonl", folder_ / "log"}},
               with_fault({"rename", below(folder_, "run/config.toml"), 1, paused}));
  });
  EXPECT_TRUE(appears(paused));
  const Outcome same_folder = run();
  EXPECT_EQ(same_folder.exit_code, 1);
  EXPECT_TRUE(has(same_folder.err, {"one run at a time", folder_ / "run)"}));
  const Outcome same_log = run({{"out", folder_ / "run2"}, {"log.jsonl", folder_ / "log"}});
  EXPECT_EQ(same_log.exit_code, 1);
  EXPECT_TRUE(has(same_log.err, {"one run at a time", folder_ / "log)"}));
  const Outcome neither = run({{"out", folder_ / "run2"}});
  EXPECT_EQ(neither.exit_code, 0) << neither.err;
  fs::remove(paused);
  const Outcome outcome = first.get();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(num_lines("log"), 3);
  // A run that is killed holds nothing.
  const Outcome killed =
      run({}, with_fault({"rename", below(folder_, "run/config.toml"), 1, "kill"}));
  EXPECT_EQ(killed.exit_code, -1);
  const Outcome after = run();
  EXPECT_EQ(after.exit_code, 0) << after.err;
  for (const auto& entry : fs::directory_iterator(folder_ / "run")) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

TEST_F(StartFaults, WithoutLocksARunSaysSoAndGoesOn) {
  const Outcome outcome =
      run({}, with_fault({"flock", below(folder_, "run/.lock"), 1, std::to_string(ENOLCK)}));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_TRUE(has(outcome.err, {"warning: no locks", folder_ / "run"}));
}

TEST_F(StartFaults, TheLogMayBeAPipeOrTheTerminal) {
  const std::string pipe = folder_ / "pipe", read = folder_ / "read";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Outcome piped =
      shell("cat " + pipe + " > " + read + " & ", {{"log.jsonl", pipe}}, " && wait");
  EXPECT_EQ(piped.exit_code, 0) << piped.err;
  EXPECT_EQ(num_lines("read"), 3);
  const Outcome null = run({{"log.jsonl", "/dev/null"}});
  EXPECT_EQ(null.exit_code, 0) << null.err;
  // As a pipe, and as a file, where neither output may lose what the other wrote.
  const Outcome through = shell("", {{"log.jsonl", "/dev/stdout"}}, " | cat");
  EXPECT_TRUE(has(through.out, {"model: ", "\"step\":1", "\"final\"", "parameters sha256"}));
  const Outcome outcome = run({{"log.jsonl", "/dev/stdout"}, {"log.every", "1"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"model: ", "device: ", "\"step\":1", "step     1/2", "\"step\":2",
                                "\"final\"", "parameters sha256"}));
  EXPECT_EQ(outcome.out.find('\0'), std::string::npos);
  // After what stderr has said.
  const Outcome on_stderr =
      run({{"log.jsonl", "/dev/stderr"}},
          with_fault({"flock", below(folder_, "run/.lock"), 1, std::to_string(ENOLCK)}));
  EXPECT_TRUE(has(on_stderr.err, {"warning: no locks", "\"step\":1", "\"final\""}));
}

}  // namespace
}  // namespace tessera
