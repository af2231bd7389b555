// Lines of a .jsonl. Ahead of them a line that begins with what they are read as: t, texts; p,
// texts after prompts; c, messages by the pattern that the rest of it is.
#include "tools/data/documents.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/io/json.h"
#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {

const char* const kTarget = "documents";

namespace {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) lines.push_back(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::vector<std::string> read(const std::string& path, const tools::DocumentFields& fields) {
  std::vector<std::string> documents;
  tools::visit_documents(path, fields, [&](const tools::Document& document) {
    promise(!document.parts.empty(), "expected a part");
    promise(!fields.learns_all || (document.parts.size() == 1 && document.parts[0].is_learned),
            "expected one part that is learned");
    std::string text;
    for (std::size_t i = 0; i < document.parts.size(); ++i) {
      text += document.parts[i].text;
      promise(i == 0 || document.parts[i].is_learned != document.parts[i - 1].is_learned,
              "expected neighbours that are learned alike to be one part");
    }
    promise(document.nbytes() == std::ssize(text), "expected the bytes of all parts");
    documents.push_back(std::move(text));
  });
  return documents;
}

}  // namespace

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  const std::string_view first = input.substr(0, input.find('\n'));
  input.remove_prefix(std::min(first.size() + 1, input.size()));
  const char kind = first.empty() ? 't' : first[0];
  tools::DocumentFields fields{.text = kind == 'c' ? "messages" : "text"};
  if (kind == 'p') fields.prompt = "prompt";
  if (kind == 'c') fields.chat.emplace(first.substr(1));

  const std::string path = folder.write("lines.jsonl", input);
  const std::vector<std::string> documents = read(path, fields);
  fields.learns_all = true;
  promise(read(path, fields) == documents, "expected the text, whatever of it is learned");

  const std::vector<std::string_view> lines = lines_of(input);
  promise(documents.size() == lines.size(), "expected a document of each line");
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const nlohmann::json line = engine::parse_json(lines[i], "line");
    std::size_t nbytes = 0;  // that the document has at least
    if (kind == 'c') {
      for (const nlohmann::json& message : line.at("messages")) {
        const auto& content = message.at("content").get_ref<const std::string&>();
        nbytes += content.size();
        promise(documents[i].find(content) != std::string::npos, "expected what a message says");
      }
      promise(documents[i].size() >= nbytes, "expected every message");
      continue;
    }
    const std::string prompt = kind == 'p' ? line.at("prompt") : nlohmann::json("");
    promise(documents[i] == prompt + line.at("text").get<std::string>(),
            "expected the text of the line, after its prompt");
  }
}

}  // namespace tessera::fuzz
