// Whether data, the format they are in and the model belong together: for programs that train and
// for those that only say what training would do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/data/token_dataset.h"

namespace tessera::tools {

struct DataFit {
  TokenFormat format = TokenFormat::kAuto;  ///< that was asked for
  std::int64_t vocab = 256;                 ///< of the model
  std::string init_from = {};  ///< whose tokenizer made the model's tokens; empty: no one's
  bool packing = false;        ///< that was asked for
};

/// Looks at the first bytes of `file` and throws IoError that says what to do: text where tokens
/// should be, or the other way round; numbers wider than they are read; bytes for a model of
/// another tokenizer's tokens; ids that are too narrow for the vocabulary. What DataFit::format
/// says by name is believed, as far as it can be. Throws InvalidArgument for packing where the file
/// does not keep documents apart.
void check_data_fit(const TokenFile& file, const DataFit& fit);

/// What is possible and seldom meant, a line each. `max_token`: the largest of `file`, or, where
/// nobody has read all of it, TokenFile::max_possible_token().
std::vector<std::string> data_warnings(const TokenFile& file, const DataFit& fit,
                                       std::int64_t max_token);

/// How many sequences, of how many tokens, and what is in them, in words: "32 sequences of 8".
std::string sequences_text(const TokenDataset& data);

/// Of data that keep documents apart. `is_mean_of_means`: their loss is that of micro-batches.
std::vector<std::string> document_warnings(const TokenDataset& data, bool is_mean_of_means);

}  // namespace tessera::tools
