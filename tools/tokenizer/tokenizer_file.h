// The files of a tokenizer, and what is in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/tokenizer/added_tokens.h"
#include "tools/tokenizer/bpe.h"
#include "tools/tokenizer/decoder.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/post_processor.h"
#include "tools/tokenizer/pre_tokenizer.h"

namespace tessera::tools {

/// The longest tokenizer.json that is read; those of known models have up to 35 MB.
inline constexpr std::int64_t kMaxTokenizerNbytes = std::int64_t{128} << 20;

struct TokenizerParts {
  std::vector<std::string> tokens{};  ///< by id
  Normalizer normalizer{};
  PreTokenizer pre_tokenizer{};
  AddedTokens added{};
  Bpe bpe;
  PostProcessor post_processor{};
  Decoder decoder{};
  std::optional<std::int32_t> bos{}, eos{};
};

/// Reads tokenizer.json. Throws IoError naming file and key for what is not known here (see
/// docs/tokenizers.md), for ids that are not each below the number of tokens and given once, and
/// for merges of what is no token.
TokenizerParts read_tokenizer_json(const std::string& path);
/// Reads GPT-2's vocab.json and merges.txt in `folder`. Throws IoError as read_tokenizer_json().
TokenizerParts read_gpt2_tokenizer(const std::string& folder);

/// Reads the first and the last token of a text, as `folder`/tokenizer_config.json names them, if
/// it is there. Throws IoError naming file and key for one that is no token.
void read_bos_and_eos(const std::string& folder, TokenizerParts& parts);
/// Also add_bos_token, add_eos_token and add_prefix_space, which transformers heeds for GPT-2's
/// files: a tokenizer.json says by itself what stands around a text.
void read_gpt2_tokenizer_config(const std::string& folder, TokenizerParts& parts);

}  // namespace tessera::tools
