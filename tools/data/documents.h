// The documents of files: a text each, or each line of a .jsonl.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tools/data/chat_template.h"

namespace tessera::tools {

/// Whether `path` is read line by line.
bool is_jsonl(std::string_view path);

/// A document in order, in texts of which each is learned or only read; at least one.
struct Document {
  std::span<const DocumentPart> parts;
  std::string_view place;   ///< of its file, and line
  std::string remark = {};  ///< what is odd of the file that it is all of, for people; may be empty

  std::int64_t nbytes() const;
};

/// What of a line of a .jsonl makes a document.
struct DocumentFields {
  std::string text = {};    ///< key of a text, with `chat` of a list of messages
  std::string prompt = {};  ///< key of a text that comes before it and is read only; empty: none
  /// How messages become texts, of which those of the assistant are learned.
  std::optional<ChatTemplate> chat = {};
  bool learns_all = false;  ///< prompts, and the messages of others, as well

  /// Whether some texts may be read only.
  bool reads_only() const { return !learns_all && (!prompt.empty() || chat.has_value()); }
};

/// Calls `use` with each document of the file at `path`: with what `fields` says of each line of a
/// .jsonl, which must be a JSON object, empty lines left out; otherwise with all of the file.
/// Throws IoError naming the file, and the line: unreadable, no text but a file of another kind, in
/// UTF-16, over 1 GiB at once, no such text, no such messages. Of a message role, content and
/// weight are read, and one that calls tools is none.
void visit_documents(const std::string& path, const DocumentFields& fields,
                     const std::function<void(const Document& document)>& use);

}  // namespace tessera::tools
