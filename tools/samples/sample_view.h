// One sample as training reads it, for people.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/data/token_mix.h"

namespace tessera::tools {

/// Tokens that follow each other, all learned or none.
struct TokenRun {
  bool is_learned = false;
  std::vector<std::int32_t> ids = {};
};

/// A document of a sequence, or a part of one; of a file without documents the sequence.
struct DocumentView {
  std::int64_t first = 0, last = 0;  ///< tokens of the file; `last` is a target alone
  std::int64_t document = -1;        ///< which one of the file; -1: it keeps none apart
  bool is_part = false;              ///< of that document
  std::vector<TokenRun> runs = {};   ///< a last token that is not learned is not among them
};

struct SampleView {
  std::string path;  ///< of the file
  std::vector<DocumentView> documents = {};
  std::int64_t num_tokens = 0, num_learned = 0, num_padding = 0;  ///< of the tokens that are read
};

/// Sample `n` of training, or with `is_validation` that sequence, out of the very batch that a
/// model gets. Throws as TokenMix::batch() and val_batch().
SampleView view_of(const TokenMix& data, std::int64_t n, bool is_validation);

/// Turns ids into text, one after the other: called with each id of a document, and at its end with
/// none for what was held back.
using TextOf = std::function<std::string(const std::int32_t* id)>;

/// `view` as lines for a terminal.
std::vector<std::string> lines_of(const SampleView& view, const TextOf& text_of);

}  // namespace tessera::tools
