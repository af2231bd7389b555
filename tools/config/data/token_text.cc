#include "tools/config/data/token_text.h"

#include <utility>

#include "engine/error.h"
#include "tools/data/target_text.h"

namespace tessera::tools {
namespace {

void check_vocabulary(const Tokenizer& tokenizer, const TokenMix& data) {
  for (const TokenDataset& source : data.sources()) {
    engine::require<engine::IoError>(
        source.max_token() < tokenizer.vocab_size(),
        "[config] expected tokens of the tokenizer, which has {}, got {}: of which are the data? "
        "(data.tokenizer, {})",
        tokenizer.vocab_size(), source.max_token(), source.file().path());
  }
}

}  // namespace

std::optional<Tokenizer> tokenizer_of(const TokenDataConfig& config, const std::string& init_from,
                                      const TokenMix& data) {
  try {
    std::optional<Tokenizer> tokenizer = config.read_tokenizer(init_from);
    if (tokenizer) check_vocabulary(*tokenizer, data);
    return tokenizer;
  } catch (const engine::IoError&) {
    if (!config.tokenizer.empty()) throw;
    return std::nullopt;
  }
}

TokenText token_text(const TokenDataConfig& config, const std::string& init_from,
                     const TokenMix& data, std::optional<Tokenizer> made_by) {
  if (data.is_bytes()) return {};
  if (made_by) check_vocabulary(*made_by, data);
  TokenText text{made_by ? std::move(made_by) : tokenizer_of(config, init_from, data)};
  if (text.tokenizer) text.num_val_nbytes = num_val_nbytes(data, *text.tokenizer);
  return text;
}

}  // namespace tessera::tools
