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

/// Runs `fn` in `size` processes with what `join` gives each, and returns what each says. What
/// fails in one fails the test.
inline std::vector<std::string> said_by_processes(
    int size, const std::function<std::unique_ptr<ProcessGroup>(int process)>& join,
    const std::function<std::string(ProcessGroup&)>& fn) {
  return said_by_processes(size, [&](int process) { return fn(*join(process)); });
}

}  // namespace tessera::comm
