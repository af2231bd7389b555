// A profiler is told of every region and launch of a step by name, each within what it is part of.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

TEST(Nvtx, RangesCarryUnitsAndPhases) {
  const testing::TempFolder folder;
  const testing::Outcome outcome = testing::run_program(
      "tests/cuda_emulation/toy_steps", {"zero3"},
      {{"NVTX_INJECTION64_PATH", std::filesystem::absolute("tests/cuda_emulation/nvtx_log.so")},
       {"NVTX_LOG", folder / "ranges"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;

  std::map<std::string, std::vector<std::string>> open;  // by thread
  std::set<std::string> paths;
  std::istringstream lines(folder.read("ranges"));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    std::vector<std::string>& stack = open[line.substr(0, space)];
    if (line[space + 1] == '<') {
      ASSERT_FALSE(stack.empty()) << "a range ends that has not begun";
      stack.pop_back();
      continue;
    }
    stack.push_back(line.substr(space + 3));
    std::string path;
    for (const std::string& text : stack) path += (path.empty() ? "" : " / ") + text;
    paths.insert(path);
  }
  EXPECT_EQ(open.size(), 2u) << "threads: one a rank";
  for (const auto& [thread, stack] : open) EXPECT_TRUE(stack.empty()) << stack.back();
  std::string all;
  for (const std::string& path : paths) all += path + "\n";
  for (const char* path :
       {"root forward / all_gather h.0 forward",
        "root forward / h.0 forward / all_gather h.1 forward",
        "root forward / h.1 forward / affine", "root backward / h.2 backward / affine backward",
        "root backward / h.2 backward / all_gather h.1 backward",
        "root backward / h.1 backward / reduce_scatter h.1 gradient", "optimizer h.2"}) {
    EXPECT_TRUE(paths.contains(path)) << path << ", not in\n" << all;
  }
}

}  // namespace
}  // namespace tessera
