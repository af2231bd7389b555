#include "tools/data/token_writer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "engine/error.h"
#include "engine/io/file.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

void TokenWriter::add(std::span<const std::int32_t> tokens) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  require(!keeps_documents_, "[token_file] expected documents, got tokens of none");
  require<IoError>(std::ssize(tokens) <= kMax - num_tokens(),
                   "[token_file] expected at most {} tokens in a file, got more: write several",
                   kMax);
  for (const std::int32_t token : tokens) {
    require(token >= 0 && (!is_short_ || token <= std::numeric_limits<std::uint16_t>::max()),
            "[token_file] expected tokens of {} bits, got {}", num_bits(), token);
    if (is_short_) {
      short_.push_back(static_cast<std::uint16_t>(token));
    } else {
      long_.tokens.push_back(static_cast<std::uint32_t>(token));
    }
  }
}

void TokenWriter::add_document(std::span<const std::uint32_t> tokens) {
  require(keeps_documents_, "[token_file] expected tokens of no document, got a document");
  long_.add(tokens);
}

void TokenWriter::write(const std::string& path) const {
  std::array<std::int32_t, 256> header{};
  header[0] = keeps_documents_ ? kDocumentsMagic : is_short_ ? 20240520 : 20240801;
  header[1] = keeps_documents_ || is_short_ ? 1 : 7;
  if (!keeps_documents_) header[2] = static_cast<std::int32_t>(num_tokens());
  engine::AtomicFile file(path);
  file.write(std::as_bytes(std::span(header)));
  if (keeps_documents_) {
    const std::array<std::int64_t, 2> counts{num_tokens(), std::ssize(long_.ends)};
    file.write(std::as_bytes(std::span(counts)));
    file.write(std::as_bytes(std::span(long_.ends)));
  }
  file.write(std::as_bytes(std::span(short_)));
  file.write(std::as_bytes(std::span(long_.tokens)));
  file.commit();
}

}  // namespace tessera::tools
