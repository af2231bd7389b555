// What a rank declares: its next call carries it to the other processes.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace tessera::comm {

/// Of one rank, since its last call.
class Declared {
 public:
  void add(std::string_view what) {
    if (!text_.empty()) text_ += "; ";
    text_ += what;
  }
  /// `text` of the next call, and what was declared before it.
  std::string before(std::string text) {
    if (!text_.empty()) text += fmt::format(" after '{}'", std::exchange(text_, {}));
    return text;
  }

 private:
  std::string text_;
};

}  // namespace tessera::comm
