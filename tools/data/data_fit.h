// Whether data, the format they are in and the model belong together: for programs that train and
// for those that only say what training would do.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"

namespace tessera::tools {

struct DataFit {
  TokenFormat format = TokenFormat::kAuto;  ///< that was asked for
  std::int64_t vocab = 256;                 ///< of the model
  std::string init_from = {};        ///< whose tokenizer made the model's tokens; empty: no one's
  std::string option = "data.path";  ///< that names the files
  bool tokenizes = false;            ///< a tokenizer makes the tokens of texts
};

/// Whether the bytes of `file` are its tokens, and not to be made tokens.
bool are_tokens_bytes(const TokenFile& file, const DataFit& fit);

/// Looks at the first bytes of `file` and throws IoError that says what to do: text where tokens
/// should be, or the other way round; numbers wider than they are read; bytes for a model of
/// another tokenizer's tokens; ids that are too narrow for the vocabulary. What DataFit::format
/// says by name is believed, as far as it can be.
void check_data_fit(const TokenFile& file, const DataFit& fit);

/// check_data_fit() of all `files`, which are sources of one mix. Throws IoError for bytes and
/// token ids together. `packing`: InvalidArgument where no file keeps documents apart.
void check_mix_fit(std::span<const TokenFile> files, const DataFit& fit, bool packing);

/// What is possible and seldom meant, a line each. `max_token`: the largest of `file`, or, where
/// nobody has read all of it, TokenFile::max_possible_token().
std::vector<std::string> data_warnings(const TokenFile& file, const DataFit& fit,
                                       std::int64_t max_token);

/// How many sequences, of how many tokens, and what is in them, in words: "32 sequences of 8".
std::string sequences_text(const TokenDataset& data);

/// As a line of a summary: files, their shares, sequences_text() of each.
std::string mix_text(const TokenMix& data);

/// data_warnings() of each source, and what is to be said of those that keep documents apart.
/// `is_mean_of_means`: the loss is that of micro-batches.
std::vector<std::string> mix_warnings(const TokenMix& data, const DataFit& fit,
                                      bool is_mean_of_means);

}  // namespace tessera::tools
