#include "tools/tokenizer/tokenizer.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

Tokenizer Tokenizer::read(const std::string& path) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  if (is_folder) check_save_ended(path);
  const std::string file = is_folder ? path + "/tokenizer.json" : path;
  if (!is_folder || !is_missing(file)) {
    TokenizerParts parts = read_tokenizer_json(file);
    const std::string folder = std::filesystem::path(file).parent_path().string();
    read_bos_and_eos(folder.empty() ? "." : folder, parts);
    return Tokenizer(std::move(parts));
  }
  const bool is_sentencepiece = !is_missing(path + "/tokenizer.model");
  require<IoError>(!is_missing(path + "/vocab.json") && !is_missing(path + "/merges.txt"),
                   "[tokenizer] expected tokenizer.json, or vocab.json and merges.txt, got {} ({})",
                   is_sentencepiece
                       ? "tokenizer.model of SentencePiece: write a tokenizer.json, in Python "
                         "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
                       : "none",
                   path);
  TokenizerParts parts = read_gpt2_tokenizer(path);
  read_gpt2_tokenizer_config(path, parts);
  return Tokenizer(std::move(parts));
}

Tokenizer::Tokenizer(TokenizerParts parts)
    : parts_(std::move(parts)), is_special_(parts_.tokens.size()) {
  for (const AddedToken& token : parts_.added.all()) {
    const bool is_same = token.text == token.content;
    is_special_[static_cast<std::size_t>(token.id)] = token.special && is_same;
    if (!is_same) normalized_.emplace(token.id, token.text);
  }
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::vector<std::int32_t> ids;
  Encoder(*this).encode(text, add_special_tokens, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const std::int32_t id : ids) {
    require(id >= 0 && id < vocab_size(), "[tokenizer] expected ids in [0, {}), got {}",
            vocab_size(), id);
    const auto at = static_cast<std::size_t>(id);
    if (skip_special && is_special_[at]) continue;
    const auto normalized = normalized_.find(id);
    tokens.push_back(normalized == normalized_.end() ? parts_.tokens[at] : normalized->second);
  }
  return parts_.decoder.text_of(std::move(tokens));
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = std::ranges::find(parts_.tokens, token);
  if (found == parts_.tokens.end()) return std::nullopt;
  return static_cast<std::int32_t>(found - parts_.tokens.begin());
}

void Encoder::encode(std::string_view text, bool add_special_tokens,
                     std::vector<std::int32_t>& ids) {
  constexpr std::size_t kMaxNbytes = (std::size_t{1} << 31) - 1;
  require(text.size() <= kMaxNbytes, "[tokenizer] expected a text of at most {} bytes, got {}",
          kMaxNbytes, text.size());
  const auto add = [&](std::span<const std::int32_t> more) {
    if (add_special_tokens) ids.insert(ids.end(), more.begin(), more.end());
  };
  const std::string_view valid = valid_utf8(text, valid_);
  add(parts_.post_processor.before());
  parts_.added.visit(valid, [&](const AddedToken* token, std::string_view part) {
    if (token != nullptr) return ids.push_back(token->id);
    const bool is_first = part.data() == valid.data();
    const std::string_view normal = parts_.normalizer.normalized(part, regex_, normalized_);
    parts_.added.visit_normalized(normal, [&](const AddedToken* other, std::string_view words) {
      if (other != nullptr) return ids.push_back(other->id);
      encode_words(words, is_first && words.data() == normal.data(), ids);
    });
  });
  add(parts_.post_processor.after());
}

void Encoder::encode_words(std::string_view text, bool is_start, std::vector<std::int32_t>& ids) {
  parts_.pre_tokenizer.visit(text, is_start, regex_,
                             [&](std::string_view word) { parts_.bpe.encode(word, bpe_, ids); });
}

std::string StreamDecoder::added_by(const std::string& text) const {
  if (text.starts_with(known_)) return text.substr(known_.size());
  // What was returned turned out to be of bytes that are no text.
  return tokenizer_.decode(std::span(ids_).subspan(num_known_), skip_special_);
}

std::string StreamDecoder::next(std::int32_t id) {
  const auto at = static_cast<std::size_t>(id);
  const std::vector<bool>& is_special = tokenizer_.is_special_;
  if (skip_special_ && at < is_special.size() && is_special[at]) return "";
  ids_.push_back(id);
  const std::string text = tokenizer_.decode(ids_, skip_special_);
  // No character has more than four bytes, and no token fewer than one.
  constexpr std::size_t kMost = 16, kOfOneCharacter = 4;
  const std::string open_end = to_utf8(kReplacement);
  const bool is_open = text.ends_with(open_end);
  const std::size_t num_new = ids_.size() - num_known_;
  if (is_open && num_new < kMost) return "";
  std::string added = added_by(text);
  num_known_ = is_open ? kOfOneCharacter : num_new;
  ids_.erase(ids_.begin(), ids_.end() - static_cast<std::ptrdiff_t>(num_known_));
  known_ = tokenizer_.decode(ids_, skip_special_);
  if (is_open && added.ends_with(open_end) && known_.ends_with(open_end)) {
    added.resize(added.size() - open_end.size());
    known_.resize(known_.size() - open_end.size());
  }
  return added;
}

std::string StreamDecoder::finish() {
  std::string added = added_by(tokenizer_.decode(ids_, skip_special_));
  ids_.clear();
  num_known_ = 0;
  known_.clear();
  return added;
}

}  // namespace tessera::tools
