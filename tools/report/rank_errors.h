// What the ranks of a process threw: whose an error is.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "tools/report/local_ranks.h"

namespace tessera::tools {

class RankErrors {
 public:
  explicit RankErrors(const LocalRanks& ranks)
      : ranks_(ranks), errors_(static_cast<std::size_t>(ranks.count)) {}

  /// fn() of rank `rank`, and keeps what it throws. Each rank calls it in its own thread.
  template <class F>
  void watch(int rank, F&& fn) {
    try {
      fn();
    } catch (...) {
      errors_[ranks_.index(rank)] = std::current_exception();
      throw;
    }
  }
  /// When the ranks have ended: `message`, which is that of their error, after those who threw it:
  /// "rank 3: ", "ranks 0, 2-3: ", "all 4 ranks: " of the run. As it is where the run has one rank,
  /// where it says by itself which one it is about, and where no rank here threw it.
  std::string named(const std::string& message) const;

 private:
  LocalRanks ranks_;
  std::vector<std::exception_ptr> errors_;  // of each; null: none
};

/// What `error` says; kNoMemory for one of the system's.
std::string message_of(const std::exception_ptr& error);

}  // namespace tessera::tools
