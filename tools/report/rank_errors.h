// What the ranks of a run threw: whose an error is.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

namespace tessera::tools {

class RankErrors {
 public:
  explicit RankErrors(int num_ranks) : errors_(static_cast<std::size_t>(num_ranks)) {}

  /// fn() of rank `rank`, and keeps what it throws. Each rank calls it in its own thread.
  template <class F>
  void watch(int rank, F&& fn) {
    try {
      fn();
    } catch (...) {
      errors_[static_cast<std::size_t>(rank)] = std::current_exception();
      throw;
    }
  }
  /// When all ranks have ended: `message`, which is that of their error, behind those who threw it:
  /// "rank 3: ", "ranks 0, 2-3: ", "all 4 ranks: ". As it is where there is one rank, where it says
  /// by itself which one it is about, and where no rank threw it.
  std::string named(const std::string& message) const;

 private:
  std::vector<std::exception_ptr> errors_;  // by rank; null: none
};

/// What `error` says; kNoMemory for one of the system's.
std::string message_of(const std::exception_ptr& error);

}  // namespace tessera::tools
