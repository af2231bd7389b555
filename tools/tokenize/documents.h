// The documents of files: a text each, or each line of a .jsonl.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace tessera::tools {

/// Whether `path` is read line by line.
bool is_jsonl(std::string_view path);

struct Document {
  std::string_view prompt = {};  ///< comes before the text
  std::string_view text = {};
  std::string remark =
      {};  ///< what is odd of the file that it is all of, for people; empty: nothing
};

/// Keys of the lines of a .jsonl.
struct DocumentFields {
  std::string prompt = {};  ///< empty: none
  std::string text = {};
};

/// Calls `use` with each document of the file at `path`: with the texts at `fields` of each line of
/// a .jsonl, which must be a JSON object, empty lines left out; otherwise with all of the file.
/// Throws IoError naming the file, and the line: unreadable, no text but a file of another kind, in
/// UTF-16, over 1 GiB at once, no such text.
void visit_documents(const std::string& path, const DocumentFields& fields,
                     const std::function<void(const Document& document)>& use);

}  // namespace tessera::tools
