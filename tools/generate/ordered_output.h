// Several texts that come at one time, written one after the other.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// Any thread may add to any text. What is added to the first that has not ended is written at
/// once, and the others wait for their turn.
class OrderedOutput {
 public:
  /// `write` is called with what comes next, by one thread at a time, and returns whether it could
  /// be written.
  OrderedOutput(std::size_t num_texts, std::function<bool(std::string_view)> write)
      : texts_(num_texts), write_(std::move(write)) {}

  /// Returns false when something could not be written: there is no use in more.
  bool add(std::size_t text, std::string_view more);
  bool end(std::size_t text, std::string_view last);

 private:
  struct Text {
    std::string waiting;
    bool has_ended = false;
  };

  bool write_what_is_due();

  std::mutex mutex_;
  std::vector<Text> texts_;
  std::function<bool(std::string_view)> write_;
  std::size_t current_ = 0;  // the first that has not ended
  bool is_good_ = true;
};

/// `text` whose control characters but tabs and ends of lines are escaped, for a terminal, which
/// they would command.
std::string without_commands(std::string_view text);

}  // namespace tessera::tools
