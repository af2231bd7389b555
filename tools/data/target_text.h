// The text that tokens for validation are, for a loss by bytes, which models of other tokenizers
// have as well.
#pragma once

#include <cstdint>

#include "tools/data/token_mix.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// Bytes of the text of all targets for validation that are learned, special tokens left out. Of
/// a character that the border of a sequence cuts each part counts as U+FFFD, 3 bytes or more.
/// Throws IoError as TokenMix::val_batch(), InvalidArgument for a token that `tokenizer` does not
/// have.
std::int64_t num_val_nbytes(const TokenMix& data, const Tokenizer& tokenizer);

}  // namespace tessera::tools
