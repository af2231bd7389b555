// Lines of a .jsonl. The first line of the input says how they are read: "t", as texts; "p", as
// texts after prompts; "c" and a pattern, as messages by that pattern.
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

struct Texts {
  std::string all, learned;
};

std::vector<Texts> read(const std::string& path, const tools::DocumentFields& fields) {
  std::vector<Texts> documents;
  tools::visit_documents(path, fields, [&](const tools::Document& document) {
    promise(!document.parts.empty(), "expected a part");
    Texts texts;
    for (std::size_t i = 0; i < document.parts.size(); ++i) {
      const auto& [text, is_learned] = document.parts[i];
      texts.all += text;
      if (is_learned) texts.learned += text;
      promise(i == 0 || is_learned != document.parts[i - 1].is_learned,
              "expected neighbours that are learned alike to be one part");
    }
    promise(document.nbytes() == std::ssize(texts.all), "expected the bytes of all parts");
    documents.push_back(std::move(texts));
  });
  return documents;
}

// Takes each of `texts` from `document` in order.
void expect_in_order(std::string_view document, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    const std::size_t at = document.find(text);
    promise(at != std::string_view::npos, "expected what a message says, in its place");
    document.remove_prefix(at + text.size());
  }
}

void check_chat(const Texts& document, const nlohmann::json& messages) {
  std::vector<std::string> all, learned;
  for (const nlohmann::json& message : messages) {
    all.push_back(message.at("content"));
    const bool has_weight =
        !message.contains("weight") || message["weight"].is_null() || message["weight"] == 1;
    if (has_weight && message.at("role") == "assistant") learned.push_back(all.back());
  }
  expect_in_order(document.all, all);
  expect_in_order(document.learned, learned);
  promise(!learned.empty() || document.learned.empty(), "expected nothing to learn");
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
  const std::vector<Texts> documents = read(path, fields);
  const std::vector<std::string_view> lines = lines_of(input);
  promise(documents.size() == lines.size(), "expected a document of each line");
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const nlohmann::json line = engine::parse_json(lines[i], "line");
    if (kind == 'c') {
      check_chat(documents[i], line.at("messages"));
      continue;
    }
    const std::string prompt = kind == 'p' ? line.at("prompt") : nlohmann::json("");
    const std::string text = line.at("text");
    promise(documents[i].all == prompt + text, "expected the text of the line, after its prompt");
    promise(documents[i].learned == text, "expected the text to be learned, and not the prompt");
  }

  fields.learns_all = true;
  const std::vector<Texts> learned = read(path, fields);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    promise(learned[i].all == documents[i].all && learned[i].learned == documents[i].all,
            "expected all of the text to be learned");
  }
}

}  // namespace tessera::fuzz
