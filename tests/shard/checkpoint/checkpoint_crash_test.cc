// Saves that are killed, or cut off from power, at every system call: what is there afterwards is
// the old checkpoint or the new one, whole.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/reader.h"
#include "tests/shard/checkpoint/checkpoint_crash_run.h"
#include "tests/testing/faults.h"
#include "tests/testing/program.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::below;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::crash_run;
using testing::Fault;
using testing::Outcome;
using testing::TempFolder;
using testing::train_saving;

namespace fs = std::filesystem;

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

void kill_at_every_call(bool async) {
  ::setenv("TEST_NO_FLUSH", "1", 1);
  const TempFolder start;
  train_saving(crash_run(start / "c", 1, async));
  CheckpointRun whole = crash_run(start / "none", 4, async);
  whole.save_every = 0;
  const CheckpointResult expected = train_saving(whole);
  std::map<int, int> resumed;  // how often from which step
  int at = 1;
  for (bool ended = false; !ended; at += testing::kIsSlow ? 7 : 1) {
    const TempFolder folder;
    fs::copy(start / "c", folder / "c", fs::copy_options::recursive);
    const Fault fault{"write,fsync,close,rename,unlink,mkdir,rmdir,create", below(folder, "c"), at,
                      "kill"};
    const std::vector<std::string> arguments = {folder / "c", async ? "async" : "sync"};
    const Outcome outcome = testing::run_program("tests/shard/checkpoint/checkpoint_saves",
                                                 arguments, {{"TEST_FAULT", fault.text()}});
    ended = outcome.exit_code == 0;
    ASSERT_TRUE(ended || outcome.exit_code == -1) << outcome.out << outcome.err;
    CheckpointRun next = crash_run(folder / "c", 4, async);
    next.save_every = 4;
    const CheckpointResult result = train_saving(next);
    EXPECT_EQ(result.values, expected.values) << "killed at call " << at;
    EXPECT_EQ(result.warnings, std::vector<std::string>());
    EXPECT_EQ(names_in(folder / "c"), (std::set<std::string>{".lock", "latest", "step_4"}))
        << "killed at call " << at;
    EXPECT_EQ(folder.read("c/latest"), "step_4\n");
    ++resumed[result.first_step];
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
  EXPECT_EQ(resumed.size(), 2u);
  EXPECT_GT(resumed[1], testing::kIsSlow ? 5 : 40);
  EXPECT_GT(resumed[2], testing::kIsSlow ? 1 : 15);
}

TEST(CheckpointCrash, EveryCall) { kill_at_every_call(false); }
TEST(CheckpointCrash, EveryCallDuringTraining) { kill_at_every_call(true); }

// What a power cut may leave
// -----------------------------------------------------------------------------------------

/// Of which all bytes, or no bytes, are there.
struct File {
  std::string bytes;  // once it is whole
  bool is_flushed = false;
};

/// A file system that remembers what was flushed.
class Disk {
 public:
  struct Node {
    std::map<std::string, std::shared_ptr<Node>> names, flushed_names;  // of a folder
    std::optional<File> file;
  };

  Disk() : root_(std::make_shared<Node>()) {}

  void apply(const std::string& call, const std::string& path, const std::string& to) {
    if (call == "mkdir") {
      names_of(path).try_emplace(last(path), std::make_shared<Node>());
    } else if (call == "create") {
      auto& node = names_of(path)[last(path)];
      if (node != nullptr) return;
      node = std::make_shared<Node>();
      node->file.emplace();
    } else if (call == "write") {
      find(path)->file->is_flushed = false;
    } else if (call == "fsync") {
      Node& node = *find(path);
      if (node.file) node.file->is_flushed = true;
      node.flushed_names = node.names;
    } else if (call == "rename") {
      const std::shared_ptr<Node> node = find(path);
      names_of(path).erase(last(path));
      names_of(to)[last(to)] = node;
    } else if (call == "unlink" || call == "rmdir") {
      names_of(path).erase(last(path));
    }
  }
  /// Writes down what is there: only what was flushed, or all names and of files only the flushed.
  void materialise(const std::string& folder, bool only_flushed) const {
    write(*root_, folder, only_flushed);
  }
  void set_bytes(const std::string& path, std::string bytes) {
    find(path)->file->bytes = std::move(bytes);
  }
  /// Null if there is none now.
  std::shared_ptr<Node> find(const std::string& path) const {
    std::shared_ptr<Node> node = root_;
    std::istringstream parts(path);
    for (std::string part; node != nullptr && std::getline(parts, part, '/');) {
      if (part.empty()) continue;
      const auto found = node->names.find(part);
      node = found == node->names.end() ? nullptr : found->second;
    }
    return node;
  }

 private:
  static std::string last(const std::string& path) { return path.substr(path.rfind('/') + 1); }
  std::map<std::string, std::shared_ptr<Node>>& names_of(const std::string& path) {
    return find(path.substr(0, path.rfind('/')))->names;
  }
  static void write(const Node& node, const std::string& folder, bool only_flushed) {
    fs::create_directories(folder);
    for (const auto& [name, child] : only_flushed ? node.flushed_names : node.names) {
      const std::string path = folder + "/" + name;
      if (!child->file) {
        write(*child, path, only_flushed);
      } else {
        std::ofstream(path, std::ios::binary)
            << (child->file->is_flushed ? child->file->bytes : "");
      }
    }
  }

  std::shared_ptr<Node> root_;
};

struct Call {
  std::string call, path, to;
};

/// Calls below `folder`, as paths from there.
std::vector<Call> calls_in(const std::string& log, const std::string& folder) {
  std::vector<Call> calls;
  std::istringstream lines(log);
  const std::string name = fs::path(folder).filename().string();
  const auto from_folder = [&](const std::string& path) {
    const auto at = path.find(name);
    return at == path.npos ? "" : path.substr(at + name.size());
  };
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Call c;
    words >> c.call >> c.path >> c.to;
    calls.push_back({c.call, from_folder(c.path), from_folder(c.to)});
  }
  return calls;
}

// Steps are marked by folders of the test's own.
TEST(CheckpointCrash, APowerCutLeavesWhatWasSaved) {
  const TempFolder folder, log;
  CheckpointRun run = crash_run(folder / "new/c", 3, false);
  run.behind_step = [&](const testing::CheckpointRank& rank, int step) {
    if (rank.world.rank() != 0) return true;
    ::mkdir((folder / ("saved-" + std::to_string(step + 1))).c_str(), 0700);
    // Before it is pruned.
    fs::copy(folder / "new/c", log / ("after-" + std::to_string(step + 1)),
             fs::copy_options::recursive);
    return true;
  };
  {
    const testing::FaultHere here({"mkdir,create,write,fsync,rename,unlink,rmdir",
                                   fs::path(folder.path()).filename().string(), -1, log / "log"});
    train_saving(run);
  }
  const std::vector<Call> calls = calls_in(log.read("log"), folder.path());
  ASSERT_GT(calls.size(), 100u);
  // What files hold in the end.
  const auto bytes_of = [&](const std::string& path, int step) -> std::string {
    std::string name = path.substr(path.rfind('/') + 1);
    const std::string in_step =
        log / ("after-" + std::to_string(step) + "/step_" + std::to_string(step) + "/" + name);
    if (name.starts_with("latest")) return "step_" + std::to_string(step) + "\n";
    std::ifstream file(in_step, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  };
  for (const bool only_flushed : {true, false}) {
    Disk disk;
    int saved = 0, num_cuts = 0, num_calls = 0;
    for (const Call& call : calls) {
      if (call.call == "mkdir" && call.path.starts_with("/saved-")) ++saved;
      if (call.path.starts_with("/saved-")) continue;
      if (call.call == "rmdir" && disk.find(call.path) == nullptr) continue;  // asks only
      if (call.call == "rmdir" && disk.find(call.path)->file) continue;
      disk.apply(call.call, call.path, call.to);
      if (call.call == "create") disk.set_bytes(call.path, bytes_of(call.path, saved + 1));
      if (testing::kIsSlow && ++num_calls % 9 != 0) continue;
      const TempFolder after;
      disk.materialise(after / "f", only_flushed);
      int newest = 0;
      for (const std::int64_t step : steps_in(after / "f/new/c")) {
        const CheckpointReader reader(checkpoint_path(after / "f/new/c", step));
        EXPECT_EQ(reader.manifest().step, step);
        newest = std::max(newest, static_cast<int>(step));
      }
      EXPECT_GE(newest, saved) << "after " << call.call << " " << call.path << " " << only_flushed;
      EXPECT_LE(newest, saved + 1);
      if (newest == 0) continue;
      CheckpointRun next = crash_run(after / "f/new/c", newest, false);
      next.save_every = 0;
      ++num_cuts;
      EXPECT_EQ(train_saving(next).first_step, newest) << call.call << " " << call.path;
      ASSERT_FALSE(::testing::Test::HasFailure());
    }
    EXPECT_EQ(saved, 3);
    EXPECT_GT(num_cuts, testing::kIsSlow ? 6 : 60);
  }
}

}  // namespace
}  // namespace tessera::shard
