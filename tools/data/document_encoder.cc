#include "tools/data/document_encoder.h"

#include <cstddef>

#include "engine/error.h"

namespace tessera::tools {

std::span<const std::uint32_t> DocumentEncoder::encode(const Document& document) {
  marked_.clear();
  const auto add = [&](std::span<const std::int32_t> ids, bool is_learned) {
    for (const std::int32_t id : ids)
      marked_.push_back(static_cast<std::uint32_t>(id) | (is_learned ? 0 : kNotLearned));
  };
  const std::span<const DocumentPart> parts = document.parts;
  if (ends_.special) add(tokenizer_.before(), parts.front().is_learned);
  for (const DocumentPart& part : parts) {
    ids_.clear();
    try {
      encoder_.encode(part.text, /*add_special_tokens=*/false, ids_);
    } catch (const engine::Error& error) {
      engine::fail<engine::IoError>("{} (of {})", error.what(), document.place);
    }
    add(ids_, part.is_learned);
  }
  const bool is_last_learned = parts.back().is_learned;
  if (ends_.special) add(tokenizer_.after(), is_last_learned);
  if (ends_.end) add(std::span(&*ends_.end, 1), is_last_learned);
  return marked_;
}

DocumentTokens encode_documents(const std::string& path, const DocumentFields& fields,
                                const Tokenizer& tokenizer, const DocumentEnds& ends) {
  DocumentEncoder encoder(tokenizer, ends);
  DocumentTokens all;
  visit_documents(path, fields,
                  [&](const Document& document) { all.add(encoder.encode(document)); });
  all.tokens.shrink_to_fit();
  return all;
}

DocumentTokens encode_text(const std::string& path, const Tokenizer& tokenizer,
                           const DocumentEnds& ends) {
  DocumentEncoder encoder(tokenizer, ends);
  DocumentTokens all;
  visit_documents(path, {}, [&](const Document& document) {
    const std::span<const std::uint32_t> tokens = encoder.encode(document);
    all.tokens.assign(tokens.begin(), tokens.end());
    all.remark = document.remark;
  });
  return all;
}

}  // namespace tessera::tools
