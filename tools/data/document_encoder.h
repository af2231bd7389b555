// Documents as the tokens that a model is trained on.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/data/documents.h"
#include "tools/data/token_file.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// What stands around the texts of a document.
struct DocumentEnds {
  bool special = true;                   ///< what the tokenizer puts around a text
  std::optional<std::int32_t> end = {};  ///< the last of a document
};

/// Encodes one document after another, in one thread. Refers to a tokenizer that outlives it.
class DocumentEncoder {
 public:
  DocumentEncoder(const Tokenizer& tokenizer, const DocumentEnds& ends)
      : tokenizer_(tokenizer), encoder_(tokenizer), ends_(ends) {}

  /// The ids of `document`, each part encoded by itself, with kNotLearned for those of a part that
  /// is only read; what stands before the first part is learned as that is, and what comes after
  /// the last as the last. Valid until the next call. Throws IoError as Tokenizer::encode().
  std::span<const std::uint32_t> encode(const Document& document);

 private:
  const Tokenizer& tokenizer_;
  Encoder encoder_;
  DocumentEnds ends_;
  std::vector<std::int32_t> ids_;
  std::vector<std::uint32_t> marked_;
};

/// All documents of the .jsonl at `path`; maybe none. Throws IoError as visit_documents() and
/// encode().
DocumentTokens encode_documents(const std::string& path, const DocumentFields& fields,
                                const Tokenizer& tokenizer, const DocumentEnds& ends);

/// All of the file at `path`, which is no .jsonl, as one long text, with the ids that
/// //tools:tokenize writes of it. Meanwhile its text and its tokens are in memory several times.
/// Throws as encode_documents().
DocumentTokens encode_text(const std::string& path, const Tokenizer& tokenizer,
                           const DocumentEnds& ends);

}  // namespace tessera::tools
