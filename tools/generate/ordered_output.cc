#include "tools/generate/ordered_output.h"

#include <algorithm>

#include "engine/io/text.h"

namespace tessera::tools {

bool OrderedOutput::add(std::size_t text, std::string_view more) {
  const std::lock_guard lock(mutex_);
  texts_.at(text).waiting += more;
  return write_what_is_due();
}

bool OrderedOutput::end(std::size_t text, std::string_view last) {
  const std::lock_guard lock(mutex_);
  texts_.at(text).waiting += last;
  texts_[text].has_ended = true;
  return write_what_is_due();
}

bool OrderedOutput::write_what_is_due() {
  for (; current_ < texts_.size(); ++current_) {
    Text& text = texts_[current_];
    if (!text.waiting.empty()) is_good_ = is_good_ && write_(text.waiting);
    text.waiting.clear();
    if (!text.has_ended) break;
  }
  return is_good_;
}

std::string without_commands(std::string_view text) {
  std::string safe;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of("\n\t"), text.size());
    safe += engine::escaped(text.substr(0, end));
    if (end < text.size()) safe += text[end];
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return safe;
}

}  // namespace tessera::tools
