// A tokenizer.json, and a text for it.
#include "tools/tokenizer/tokenizer.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

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
  for (const std::int32_t id : ids) text += stream.next(id);
  return text + stream.finish();
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

}  // namespace

void consume(std::string_view input) {
  static const testing::TempFolder folder, other_folder;
  static const tools::Tokenizer all_bytes = lossless(other_folder);
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
  const tools::Tokenizer tokenizer =
      tools::Tokenizer::read(folder.write("tokenizer.json", parts[0]));
  const Ids ids = tokenizer.encode(text);
  check_ids(tokenizer, ids);
  tokenizer.decode(ids);
  streamed(tokenizer, ids);
}

}  // namespace tessera::fuzz
