#include "tools/data/chat_template.h"

#include <cstddef>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

using engine::require;

ChatTemplate::ChatTemplate(std::string_view pattern, std::string_view option) {
  const std::string_view all = pattern;
  std::string text;
  int num_contents = 0;
  const auto take = [&](std::string_view word) {
    const bool is_next = pattern.starts_with(word);
    if (is_next) pattern.remove_prefix(word.size());
    return is_next;
  };
  while (!pattern.empty()) {
    if (take("{{")) {
      text += '{';
    } else if (take("}}")) {
      text += '}';
    } else if (take("\\n")) {
      text += '\n';
    } else if (take("\\t")) {
      text += '\t';
    } else if (take("\\\\")) {
      text += '\\';
    } else if (take("{role}")) {
      pieces_.push_back({std::exchange(text, {}), Piece::kRole});
    } else if (take("{content}")) {
      pieces_.push_back({std::exchange(text, {}), Piece::kContent});
      ++num_contents;
    } else {
      const char c = pattern.front();
      require(
          c != '{' && c != '}' && c != '\\',
          "[chat_template] expected {{role}}, {{content}}, \\n, \\t, \\\\, {{{{ or }}}}, got {} in "
          "{} ({})",
          engine::excerpt(pattern), engine::excerpt(all), option);
      text += c;
      pattern.remove_prefix(1);
    }
  }
  require(num_contents == 1,
          "[chat_template] expected {{content}} once, got it {} times in {} ({})", num_contents,
          engine::excerpt(all), option);
  pieces_.push_back({std::move(text), Piece::kEnd});
}

void ChatTemplate::add(std::string_view role, std::string_view content, bool is_learned,
                       std::vector<DocumentPart>& parts) const {
  bool is_after = false;
  const auto append = [&](std::string_view text) {
    const bool learned = is_learned && is_after;
    if (text.empty()) return;
    if (parts.empty() || parts.back().is_learned != learned) parts.push_back({"", learned});
    parts.back().text += text;
  };
  for (const Piece& piece : pieces_) {
    append(piece.text);
    if (piece.next == Piece::kRole) append(role);
    if (piece.next != Piece::kContent) continue;
    is_after = true;
    append(content);
  }
}

}  // namespace tessera::tools
