// Ranks that are real processes, for the conformance suite.
#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "tests/comm/forked_processes.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {

/// What a process tells the test: what it says, or how its expectations failed.
inline std::string report_of(const std::function<std::string()>& fn) {
  ::testing::TestPartResultArray parts;
  std::string said, failures;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &parts);
    try {
      said = fn();
    } catch (const std::exception& error) {
      failures = error.what();
    }
  }
  for (int i = 0; i < parts.size(); ++i) {
    const ::testing::TestPartResult& part = parts.GetTestPartResult(i);
    if (!part.failed()) continue;
    failures += std::string(part.file_name()) + ":" + std::to_string(part.line_number()) + ": " +
                part.message() + "\n";
  }
  return failures.empty() ? "said " + said : "failed " + failures;
}

/// Runs `fn` in `size` processes, and returns what each says. What fails in one fails the test.
inline std::vector<std::string> said_by_processes(
    int size, const std::function<std::string(int process)>& fn) {
  const ForkedProcesses processes(size, [&](int process, const AllGatherTexts&) {
    return report_of([&] { return fn(process); });
  });
  std::vector<std::string> said = processes.outcomes();
  for (std::size_t p = 0; p < said.size(); ++p) {
    if (!said[p].starts_with("said ")) ADD_FAILURE() << "process " << p << " " << said[p];
    said[p] = said[p].substr(std::min(said[p].size(), said[p].find(' ') + 1));
  }
  return said;
}

/// Runs `fn` on `size` ranks, `num_threads` in each process, and returns what each says.
/// `run_ranks(process, each)` runs `each` on those of one process. What fails in one fails the
/// test.
inline std::vector<std::string> said_by_threads_of_processes(
    int size, int num_threads, const std::function<std::string(ProcessGroup&)>& fn,
    const std::function<void(int process, const std::function<void(ProcessGroup&)>& each)>&
        run_ranks) {
  const auto texts = said_by_processes(size / num_threads, [&](int process) {
    const auto said = said_by_threads(
        size, fn,
        [&](const std::function<void(ProcessGroup&)>& each) { run_ranks(process, each); });
    std::string all;  // of any bytes, each after its length
    for (int rank = process * num_threads; rank < (process + 1) * num_threads; ++rank) {
      const std::string& text = said[static_cast<std::size_t>(rank)];
      all += std::to_string(text.size()) + " " + text;
    }
    return all;
  });
  std::vector<std::string> said;
  for (const std::string& all : texts) {
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t space = all.find(' ', at);
      if (space == all.npos) break;  // of a process that has failed
      said.push_back(all.substr(space + 1, std::stoul(all.substr(at))));
      at = space + 1 + said.back().size();
    }
  }
  return said;
}

/// Runs `fn` in `size` processes with what `join` gives each, and returns what each says. What
/// fails in one fails the test.
inline std::vector<std::string> said_by_processes(
    int size, const std::function<std::unique_ptr<ProcessGroup>(int process)>& join,
    const std::function<std::string(ProcessGroup&)>& fn) {
  return said_by_processes(size, [&](int process) { return fn(*join(process)); });
}

}  // namespace tessera::comm
