// Messages of a chat as the text that a model was trained on.
//
//   ChatTemplate chat("<|im_start|>{role}\\n{content}<|im_end|>\\n");
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// A text of a document.
struct DocumentPart {
  std::string text;
  bool is_learned = true;
};

/// Each message in order as a pattern says, which has {content} once, and may have {role}.
class ChatTemplate {
 public:
  /// In `pattern` \n, \t and \\ stand for a line break, a tab and a backslash, and {{ and }} for
  /// braces. Throws InvalidArgument for what is no pattern, naming `option`.
  explicit ChatTemplate(std::string_view pattern, std::string_view option = "template");

  /// Appends a message to `parts`: {content} and what comes after it are learned if `is_learned`.
  /// Neighbours of which both are learned, or both are not, are one part.
  void add(std::string_view role, std::string_view content, bool is_learned,
           std::vector<DocumentPart>& parts) const;

 private:
  struct Piece {
    std::string text;  // before what follows
    enum { kRole, kContent, kEnd } next;
  };
  std::vector<Piece> pieces_;
};

}  // namespace tessera::tools
