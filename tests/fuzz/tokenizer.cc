// A tokenizer.json, and a text for it.
#include "tools/tokenizer/tokenizer.h"

#include <fmt/core.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/io/text.h"
#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"
#include "tools/tokenizer/text/byte_alphabet.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::fuzz {

const char* const kTarget = "tokenizer";

namespace {

using Ids = std::vector<std::int32_t>;

void check_ids(const tools::Tokenizer& tokenizer, const Ids& ids) {
  for (const std::int32_t id : ids) {
    promise(id >= 0 && id < tokenizer.vocab_size(), "expected ids of the vocabulary");
  }
}

std::string streamed(const tools::Tokenizer& tokenizer, const Ids& ids) {
  tools::StreamDecoder stream(tokenizer, false);
  std::string text;
  const auto add = [&](const std::string& part) {
    promise(engine::is_utf8(part), "expected parts of UTF-8");
    text += part;
  };
  for (const std::int32_t id : ids) add(stream.next(id));
  add(stream.finish());
  return text;
}

bool has_replacement(const std::string& text) {
  return text.find(tools::to_utf8(tools::kReplacement)) != std::string::npos;
}

// Whether parts of a text, which is decoded without U+FFFD, add up to it. Steps that a file may
// choose freely may not let them: a Replace or a Strip may change what was returned before.
bool adds_up(const nlohmann::json& file) {
  if (file.at("model").at("vocab").contains("")) return false;
  if (!file.contains("decoder") || file.at("decoder").is_null()) return true;
  const auto& type = file.at("decoder").at("type").get_ref<const std::string&>();
  return type == "ByteLevel" || type == "ByteFallback" || type == "Fuse" || type == "Metaspace";
}

void check_parts(const tools::Tokenizer& tokenizer, const Ids& ids, bool adds_up) {
  const std::string whole = tokenizer.decode(ids, false), parts = streamed(tokenizer, ids);
  promise(!adds_up || has_replacement(whole) || parts == whole, "expected parts of the text");
}

// In GPT-2's shape, with all bytes and some merges: nothing is lost.
tools::Tokenizer lossless(const testing::TempFolder& folder) {
  const tools::ByteAlphabet alphabet;
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab[tools::to_utf8(alphabet.character_of(static_cast<unsigned char>(byte)))] = byte;
  }
  std::string merges = "#version: 0.2\n";
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
           {"a", "a"}, {"aa", "aa"}, {"Ġ", "a"}, {"â", "Ĥ"}, {"e", "n"}, {"en", "d"}}) {
    vocab[left + right] = vocab.size();
    merges += left + " " + right + "\n";
  }
  vocab["<|endoftext|>"] = vocab.size();
  folder.write("vocab.json", vocab.dump());
  folder.write("merges.txt", merges);
  return tools::Tokenizer::read(folder.path());
}

// In Llama 2's shape: byte N is token N, and there are two words.
tools::Tokenizer byte_tokens(const testing::TempFolder& folder) {
  auto file = nlohmann::json::parse(R"({
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "byte_fallback": true, "merges": ["▁ a"]}})");
  nlohmann::json& vocab = file["model"]["vocab"];
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = byte;
  for (const char* word : {"▁", "a", "▁a"}) vocab[word] = vocab.size();
  return tools::Tokenizer::read(folder.write("tokenizer.json", file.dump()));
}

}  // namespace

void consume(std::string_view input) {
  static const testing::TempFolder folder, other_folder, third_folder;
  static const tools::Tokenizer all_bytes = lossless(other_folder);
  static const tools::Tokenizer in_bytes = byte_tokens(third_folder);
  std::vector<std::string_view> parts = parts_of(input);
  parts.resize(2);
  const std::string_view text = parts[1];
  const Ids same = all_bytes.encode(text);
  check_ids(all_bytes, same);
  std::string buffer;
  promise(all_bytes.decode(same, false) == tools::valid_utf8(text, buffer),
          "expected the text that was encoded");
  promise(streamed(all_bytes, same) == tools::valid_utf8(text, buffer),
          "expected the text in parts");
  check_parts(in_bytes, in_bytes.encode(text), /*adds_up=*/true);
  Ids bytes;  // of what may be no text
  for (const char byte : text) bytes.push_back(static_cast<unsigned char>(byte));
  check_parts(in_bytes, bytes, /*adds_up=*/true);
  const tools::Tokenizer tokenizer =
      tools::Tokenizer::read(folder.write("tokenizer.json", parts[0]));
  const Ids ids = tokenizer.encode(text);
  check_ids(tokenizer, ids);
  tokenizer.decode(ids);
  check_parts(tokenizer, ids, adds_up(nlohmann::json::parse(parts[0])));
}

}  // namespace tessera::fuzz
