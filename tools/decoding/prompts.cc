#include "tools/decoding/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/data/document_encoder.h"
#include "tools/data/token_file.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

namespace {

constexpr std::int64_t kMaxNbytes = std::int64_t{1} << 30;

void check(const std::vector<Prompt>& prompts, const PromptReading& reading) {
  for (const Prompt& prompt : prompts) {
    const auto number = &prompt - prompts.data() + 1, count = std::ssize(prompt.tokens);
    require(count >= 1 && count <= reading.positions,
            "[generate] expected a prompt of 1 to {} tokens, the positions of the model, got {} "
            "(prompt {}: {})",
            reading.positions, count, number, engine::excerpt(prompt.text, 60));
    const std::int32_t largest = std::ranges::max(prompt.tokens);
    require(largest < reading.vocab,
            "[generate] expected a tokenizer of the model's {} tokens, got token {} (prompt {}: "
            "{})",
            reading.vocab, largest, number, engine::excerpt(prompt.text, 60));
  }
}

std::vector<Prompt> read_documents(const std::string& path, const DocumentFields& fields,
                                   const PromptReading& reading) {
  require<IoError>(reading.tokenizer != nullptr,
                   "[generate] expected a text of prompts for a model whose tokens are bytes, got "
                   "a .jsonl ({})",
                   path);
  DocumentEncoder encoder(*reading.tokenizer, {.special = reading.special});
  std::vector<Prompt> prompts;
  visit_documents(path, fields, [&](const Document& document) {
    const auto marked = encoder.encode(document);
    const auto is_learned = [&](std::size_t i) { return (marked[i] & kNotLearned) == 0; };
    std::size_t end = marked.size();
    while (end > 0 && !is_learned(end - 1)) --end;
    if (end == 0) end = marked.size();
    while (end > 0 && is_learned(end - 1)) --end;
    require<IoError>(end > 0,
                     "[generate] expected something before what is learned, to go on with, got "
                     "nothing ({})",
                     document.place);
    Prompt& prompt = prompts.emplace_back();
    for (const std::uint32_t token : marked.first(end))
      prompt.tokens.push_back(static_cast<std::int32_t>(token & ~kNotLearned));
    prompt.text = reading.tokenizer->decode(prompt.tokens, /*skip_special=*/false);
  });
  require<IoError>(!prompts.empty(), "[generate] expected prompts, got an empty file ({})", path);
  check(prompts, reading);
  return prompts;
}

}  // namespace

std::vector<std::string> read_prompt_file(const std::string& path) {
  const std::string text = engine::read_text_file(path, kMaxNbytes);
  const FileKind* kind = file_kind(std::string_view(text).substr(0, kFileKindNbytes));
  if (kind != nullptr && !kind->is_text()) {
    engine::fail<IoError>("[generate] expected prompts, got {}{} ({})", kind->name,
                          kind->to_unpack(), path);
  }
  std::vector<std::string> prompts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    std::string& line = prompts.emplace_back(text.substr(begin, end - begin));
    if (line.ends_with('\r')) line.pop_back();
    require<IoError>(!line.empty(), "[generate] expected a prompt, got an empty line ({}:{})", path,
                     prompts.size());
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  require<IoError>(!prompts.empty(), "[generate] expected prompts, got an empty file ({})", path);
  return prompts;
}

std::vector<Prompt> prompts_of(std::vector<std::string> texts, const PromptReading& reading) {
  std::vector<Prompt> prompts;
  std::optional<Encoder> encoder;
  if (reading.tokenizer != nullptr) encoder.emplace(*reading.tokenizer);
  for (std::string& text : texts) {
    Prompt& prompt = prompts.emplace_back();
    prompt.text = std::move(text);
    if (encoder) {
      encoder->encode(prompt.text, reading.special, prompt.tokens);
    } else {
      for (const char byte : prompt.text) prompt.tokens.push_back(static_cast<unsigned char>(byte));
    }
  }
  check(prompts, reading);
  return prompts;
}

std::vector<Prompt> read_prompts(const std::string& path, const DocumentFields& fields,
                                 const PromptReading& reading) {
  if (is_jsonl(path)) return read_documents(path, fields, reading);
  return prompts_of(read_prompt_file(path), reading);
}

std::string text_of(const Prompt& prompt, const Continuation& made, const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return std::string(made.tokens.begin(), made.tokens.end());
  StreamDecoder decoder(*tokenizer);
  // What a token is can depend on those before it: some begin with a space only there.
  for (const std::int32_t token : prompt.tokens) decoder.next(token);
  std::string text;
  const std::span<const std::int32_t> all = made.tokens;
  for (const std::int32_t token : all.first(all.size() - (made.end == End::kEos ? 1 : 0)))
    text += decoder.next(token);
  return text + decoder.finish();
}

JsonRecord record_of(const Prompt& prompt, std::string_view text, const Continuation& made) {
  return JsonRecord()
      .add("prompt", std::string_view(prompt.text))
      .add("text", text)
      .add_literal("tokens", fmt::format("[{}]", fmt::join(made.tokens, ",")))
      .add("end", name_of(made.end));
}

}  // namespace tessera::tools
