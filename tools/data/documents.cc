#include "tools/data/documents.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr std::int64_t kMaxDocumentNbytes = std::int64_t{1} << 30;
constexpr std::int64_t kChunkNbytes = std::int64_t{1} << 22;

/// Calls `use(line, place)`, without the end of the line.
template <class Use>
void visit_lines(const std::string& path, const Use& use) {
  const engine::InputFile file(path);
  std::string kept;  // from the start of a line that has no end yet
  std::int64_t number = 0;
  const auto next = [&](std::string_view line) { use(line, fmt::format("{}:{}", path, ++number)); };
  for (std::int64_t at = 0; at < file.nbytes(); at += kChunkNbytes) {
    const std::size_t begin = kept.size();
    kept.resize(begin + static_cast<std::size_t>(std::min(kChunkNbytes, file.nbytes() - at)));
    file.read(at, std::as_writable_bytes(std::span(kept).subspan(begin)));
    std::size_t done = 0;
    for (std::size_t end = kept.find('\n', begin); end != std::string::npos;
         end = kept.find('\n', done)) {
      next(std::string_view(kept).substr(done, end - done));
      done = end + 1;
    }
    kept.erase(0, done);
    require<IoError>(std::ssize(kept) <= kMaxDocumentNbytes,
                     "[documents] expected lines of at most {} bytes, got a longer one ({}:{})",
                     kMaxDocumentNbytes, path, number + 1);
  }
  if (!kept.empty()) next(kept);
}

std::string first_bytes(const std::string& path) {
  const engine::InputFile file(path);
  const auto most = static_cast<std::int64_t>(kFileKindNbytes);
  std::string head(static_cast<std::size_t>(std::min(most, file.nbytes())), '\0');
  file.read(0, std::as_writable_bytes(std::span(head)));
  return head;
}

// Throws for what is no text; returns what is odd of a text, for people.
std::string check_is_text(std::string_view text, const std::string& path) {
  const std::string_view head = text.substr(0, kFileKindNbytes);
  const FileKind* kind = file_kind(head);
  if (kind != nullptr && !kind->is_text()) {
    const std::string unpack = kind->to_unpack();
    engine::fail<IoError>("[documents] expected text, got {}{} ({})", kind->name,
                          unpack.empty() ? ": write its text to a file of its own" : unpack, path);
  }
  require<IoError>(
      !head.starts_with("\xff\xfe") && !head.starts_with("\xfe\xff"),
      "[documents] expected text in UTF-8, got UTF-16: convert it with `iconv -f UTF-16 "
      "-t UTF-8` ({})",
      path);
  require<IoError>(head.find('\0') == std::string_view::npos,
                   "[documents] expected text, got a binary file ({})", path);
  if (is_jsonl(path)) return "";
  if (kind != nullptr && kind->is_json) {
    return "is JSON, whose keys become tokens, too: if each line is a document, name it .jsonl and "
           "give --field=KEY";
  }
  if (kind != nullptr) return "is an HTML page, whose tags become tokens, too";
  if (!engine::is_utf8(text)) {
    return "is not UTF-8, and what is none becomes U+FFFD: convert it with iconv, for one from "
           "LATIN1";
  }
  return "";
}

// Throws naming what has none.
std::string text_at(json& object, const std::string& key, const std::string& place) {
  const auto found = object.find(key);
  require<IoError>(found != object.end() && found->is_string(),
                   "[documents] expected a text at key {}, got {} ({})", engine::excerpt(key),
                   found == object.end() ? "none" : "another value", place);
  return std::move(found->get_ref<std::string&>());
}

// As OpenAI's files have it: a message of weight 0 is only read.
bool has_weight(const json& message, const std::string& place) {
  const auto found = message.find("weight");
  if (found == message.end() || found->is_null()) return true;
  require<IoError>(found->is_number() && (*found == 0 || *found == 1),
                   "[documents] expected a weight of 0 or 1, got another value ({})", place);
  return *found == 1;
}

void add_messages(json& object, const DocumentFields& fields, const std::string& place,
                  std::vector<DocumentPart>& parts) {
  const auto found = object.find(fields.text);
  require<IoError>(found != object.end() && found->is_array() && !found->empty(),
                   "[documents] expected a list of messages at key {}, got {} ({})",
                   engine::excerpt(fields.text), found == object.end() ? "none" : "another value",
                   place);
  for (std::size_t i = 0; i < found->size(); ++i) {
    json& message = (*found)[i];
    const std::string at = fmt::format("message {}, {}", i, place);
    require<IoError>(message.is_object(),
                     "[documents] expected a message with role and content, got another value ({})",
                     at);
    for (const char* const call : {"tool_calls", "function_call"}) {
      const auto value = message.find(call);
      require<IoError>(value == message.end() || value->is_null() || value->empty(),
                       "[documents] expected messages of text, got {}, which no template here "
                       "writes ({})",
                       call, at);
    }
    const std::string role = text_at(message, "role", at),
                      content = text_at(message, "content", at);
    fields.chat->add(role, content, has_weight(message, at) && role == "assistant", parts);
  }
  if (parts.empty()) parts.push_back({"", /*is_learned=*/false});
}

std::vector<DocumentPart> parts_of(json& object, const DocumentFields& fields,
                                   const std::string& place) {
  std::vector<DocumentPart> parts;
  if (!fields.prompt.empty()) {
    std::string prompt = text_at(object, fields.prompt, place);
    if (!prompt.empty()) parts.push_back({std::move(prompt), /*is_learned=*/false});
  }
  if (fields.chat) {
    add_messages(object, fields, place, parts);
  } else {
    parts.push_back({text_at(object, fields.text, place)});
  }
  if (!fields.learns_all) return parts;
  DocumentPart all;
  for (const DocumentPart& part : parts) all.text += part.text;
  return {std::move(all)};
}

}  // namespace

bool is_jsonl(std::string_view path) { return path.ends_with(".jsonl"); }

std::int64_t Document::nbytes() const {
  std::int64_t nbytes = 0;
  for (const DocumentPart& part : parts) nbytes += std::ssize(part.text);
  return nbytes;
}

void visit_documents(const std::string& path, const DocumentFields& fields,
                     const std::function<void(const Document&)>& use) {
  if (!is_jsonl(path)) {
    const std::int64_t nbytes = engine::InputFile(path).nbytes();
    require<IoError>(nbytes <= kMaxDocumentNbytes,
                     "[documents] expected a text of at most {} bytes, got {}: cut it into several "
                     "files, or give its parts as lines of a .jsonl ({})",
                     kMaxDocumentNbytes, nbytes, path);
    const DocumentPart all{engine::read_text_file(path, kMaxDocumentNbytes)};
    return use(
        {.parts = std::span(&all, 1), .place = path, .remark = check_is_text(all.text, path)});
  }
  check_is_text(first_bytes(path), path);
  visit_lines(path, [&](std::string_view line, const std::string& place) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    json value = engine::parse_json(line, place);
    const engine::JsonEnd end(value);
    require<IoError>(value.is_object(), "[documents] expected a JSON object, got otherwise ({})",
                     place);
    const std::vector<DocumentPart> parts = parts_of(value, fields, place);
    use({.parts = parts, .place = place});
  });
}

}  // namespace tessera::tools
