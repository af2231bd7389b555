#include "tools/data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::int64_t kHeaderNbytes = 256 * 4;
constexpr std::int64_t kChunk = 1 << 19;  // tokens read at a time

struct LlmcFormat {
  std::int32_t magic;
  std::int32_t version;
  std::int64_t token_nbytes;
  std::string_view name;
};
constexpr std::array<LlmcFormat, 2> kLlmcFormats{
    {{20240520, 1, 2, "llm.c uint16"}, {20240801, 7, 4, "llm.c uint32"}}};

template <class T>
T max_of(std::span<const T> tokens) {
  T max = 0;
  const T* data = tokens.data();
  const std::size_t n = tokens.size();
  for (std::size_t i = 0; i < n; ++i) max = std::max(max, data[i]);
  return max;
}

/// The largest of `tokens`, which stand at `first` in the file. Throws for the first of them that
/// is not below `vocab`.
template <class T>
std::int64_t check_below(std::span<const T> tokens, std::int64_t first, std::int64_t vocab,
                         const std::string& path) {
  const auto max = static_cast<std::int64_t>(max_of(tokens));
  if (max < vocab) return max;
  const auto bad = std::ranges::find_if(
      tokens, [&](T token) { return static_cast<std::int64_t>(token) >= vocab; });
  fail<IoError>(
      "[token_file] expected tokens below the vocabulary of {}, got {} at position {}: give the "
      "--model.vocab of the tokenizer that wrote them, or the --data.format that they are in "
      "(model.vocab, {})",
      vocab, static_cast<std::int64_t>(*bad), first + (bad - tokens.begin()), path);
}

// Of tokens that are not learned, in a file of documents.
template <class T>
void clear_marks(std::span<T> raw) {
  for (T& token : raw) token = static_cast<T>(token & ~kNotLearned);
}

std::string first_bytes(const engine::InputFile& file, std::int64_t offset, std::size_t most) {
  const auto left = static_cast<std::size_t>(std::max<std::int64_t>(file.nbytes() - offset, 0));
  std::string head(std::min(most, left), '\0');
  file.read(offset, std::as_writable_bytes(std::span(head)));
  return head;
}

bool are_documents(const engine::InputFile& file) {
  std::int32_t magic = 0;
  const std::string head = first_bytes(file, 0, sizeof magic);
  std::ranges::copy(head, reinterpret_cast<char*>(&magic));
  return magic == kDocumentsMagic;
}

/// Opens it. Of a folder, which is none: says which files of token ids lie there.
engine::InputFile open_tokens(std::string path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    std::vector<std::string> names = engine::names_in_folder(path);
    std::erase_if(names, [](const std::string& name) {
      return !name.ends_with(".bin") && !name.ends_with(".txt");
    });
    std::ranges::sort(names);
    constexpr std::size_t kMost = 4;
    if (names.size() > kMost) names.resize(kMost);
    fail<IoError>("[token_file] expected a file, got a folder{}{} ({})",
                  names.empty() ? "" : ": give one of its files, such as ",
                  engine::join(names, ", "), path);
  }
  return engine::InputFile(std::move(path));
}

}  // namespace

void DocumentTokens::add(std::span<const std::uint32_t> document) {
  if (document.empty()) return;
  tokens.insert(tokens.end(), document.begin(), document.end());
  ends.push_back(std::ssize(tokens));
}

TokenFile::TokenFile(std::string path, TokenFormat format)
    : path_(path), file_(open_tokens(std::move(path))), format_("text") {
  require<IoError>(file_->nbytes() > 0, "[token_file] expected tokens, got an empty file ({})",
                   path_);
  const bool is_bin = path_.ends_with(".bin");
  if (format == TokenFormat::kAuto) {
    const FileKind* kind = file_kind(first_bytes(*file_, 0, kFileKindNbytes));
    require<IoError>(
        kind == nullptr,
        "[token_file] expected text or token ids, got {}: {}; or train on its bytes as "
        "they are with --data.format=bytes ({})",
        kind == nullptr ? "" : kind->name, kind == nullptr ? "" : kind->as_data, path_);
    if (is_bin) {
      read_header(TokenFormat::kUInt16);
    } else {
      require<IoError>(!are_documents(*file_),
                       "[token_file] expected documents in a file that is called .bin, got another "
                       "name ({})",
                       path_);
    }
  } else if (format != TokenFormat::kBytes) {
    read_header(format);
    require<IoError>(header_nbytes_ == 0,
                     "[token_file] expected token ids from the first byte on, got the header of "
                     "{}: leave out --data.format ({})",
                     format_, path_);
  } else {
    require<IoError>(!is_bin || !are_documents(*file_),
                     "[token_file] expected bytes, got documents, whose header and marks would be "
                     "learned as text: leave out --data.format ({})",
                     path_);
  }
  const std::int64_t nbytes = file_->nbytes() - header_nbytes_;
  require<IoError>(nbytes % token_nbytes_ == 0,
                   "[token_file] expected tokens of {} bytes each, got {} bytes: the file was cut "
                   "short, or is in another --data.format, such as bytes ({})",
                   token_nbytes_, nbytes, path_);
  num_tokens_ = nbytes / token_nbytes_;
}

TokenFile::TokenFile(std::string path, DocumentTokens documents)
    : path_(std::move(path)),
      in_memory_(std::move(documents.tokens)),
      format_(documents.ends.empty() ? "text" : "documents"),
      remark_(std::move(documents.remark)),
      token_nbytes_(4),
      num_tokens_(std::ssize(in_memory_)),
      document_ends_(std::move(documents.ends)) {
  require<IoError>(num_tokens_ > 0, "[token_file] expected tokens, got texts without any ({})",
                   path_);
}

/// Sets what llm.c's header says, or what `without` one is there.
void TokenFile::read_header(TokenFormat without) {
  format_ = without == TokenFormat::kUInt16 ? "nanoGPT uint16" : "uint32";
  token_nbytes_ = without == TokenFormat::kUInt16 ? 2 : 4;
  std::array<std::int32_t, 3> header{};  // magic, version, count
  const std::string head = first_bytes(*file_, 0, sizeof header);
  std::ranges::copy(head, reinterpret_cast<char*>(header.data()));
  if (header[0] == kDocumentsMagic) {
    require<IoError>(header[1] == 1, "[token_file] expected documents of version 1, got {} ({})",
                     header[1], path_);
    return read_documents();
  }
  for (const auto& format : kLlmcFormats) {
    if (header[0] != format.magic) continue;
    require<IoError>(header[1] == format.version,
                     "[token_file] expected llm.c version {} after magic {}, got {} ({})",
                     format.version, format.magic, header[1], path_);
    format_ = format.name;
    header_nbytes_ = kHeaderNbytes;
    token_nbytes_ = format.token_nbytes;
    const std::int64_t expected = kHeaderNbytes + header[2] * token_nbytes_;
    require<IoError>(header[2] > 0 && file_->nbytes() == expected,
                     "[token_file] expected {} bytes for the {} tokens of the header, got {} ({})",
                     expected, header[2], file_->nbytes(), path_);
  }
}

void TokenFile::read_documents() {
  format_ = "documents";
  token_nbytes_ = 4;
  std::array<std::int64_t, 2> counts{};  // of tokens and documents
  const std::string head = first_bytes(*file_, kHeaderNbytes, sizeof counts);
  std::ranges::copy(head, reinterpret_cast<char*>(counts.data()));
  const auto [num_tokens, num_documents] = counts;
  const std::int64_t begin = kHeaderNbytes + std::int64_t{sizeof counts};
  const std::int64_t nbytes = file_->nbytes() - begin;
  // No sum or product of these is beyond 64 bits.
  const bool fits = num_tokens > 0 && num_documents > 0 && num_documents <= nbytes / 12 &&
                    num_tokens == (nbytes - 8 * num_documents) / 4 && nbytes % 4 == 0;
  require<IoError>(fits,
                   "[token_file] expected the {} tokens and {} documents of the header, got a file "
                   "of {} bytes ({})",
                   num_tokens, num_documents, file_->nbytes(), path_);
  // A part at a time: a file of holes is refused before it takes memory.
  std::vector<std::int64_t> part;
  std::int64_t last = 0;
  for (std::int64_t at = 0; at < num_documents; at += std::ssize(part)) {
    part.resize(static_cast<std::size_t>(std::min(kChunk, num_documents - at)));
    file_->read(begin + 8 * at, std::as_writable_bytes(std::span(part)));
    for (const std::int64_t end : part) {
      require<IoError>(end > last && end <= num_tokens,
                       "[token_file] expected documents of at least one of {} tokens, got one from "
                       "{} to {} ({})",
                       num_tokens, last, end, path_);
      last = end;
    }
    document_ends_.insert(document_ends_.end(), part.begin(), part.end());
  }
  require<IoError>(last == num_tokens,
                   "[token_file] expected the last document to end with the {} tokens, got {} ({})",
                   num_tokens, last, path_);
  header_nbytes_ = begin + 8 * num_documents;
}

std::string TokenFile::head(std::size_t max_nbytes) const {
  if (!file_) {
    const auto bytes = std::as_bytes(std::span(in_memory_));
    return {reinterpret_cast<const char*>(bytes.data()), std::min(max_nbytes, bytes.size())};
  }
  return first_bytes(*file_, header_nbytes_, max_nbytes);
}

template <class Use>
void TokenFile::with_width(Use use) const {
  if (token_nbytes_ == 1) return use(std::uint8_t{});
  if (token_nbytes_ == 2) return use(std::uint16_t{});
  use(std::uint32_t{});
}

// As they lie in the file.
template <class T>
void TokenFile::read_raw(std::int64_t first, std::span<T> out) const {
  require(first >= 0 && std::ssize(out) <= num_tokens_ - first,
          "[token_file] expected a range inside {} tokens, got [{}, {}) ({})", num_tokens_, first,
          first + std::ssize(out), path());
  if (file_)
    return file_->read(header_nbytes_ + first * token_nbytes_, std::as_writable_bytes(out));
  std::copy_n(in_memory_.begin() + first, out.size(), out.begin());
}

void TokenFile::read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> out) const {
  read_some(first, vocab, out, {});
}

void TokenFile::read_targets(std::int64_t first, std::int64_t vocab,
                             std::span<std::int32_t> out) const {
  read_some(first, vocab, {}, out);
}

void TokenFile::read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> tokens,
                     std::span<std::int32_t> targets) const {
  require(tokens.size() == targets.size(),
          "[token_file] expected as many tokens as targets, got {} and {}", tokens.size(),
          targets.size());
  read_some(first, vocab, tokens, targets);
}

// Either of them may be empty.
void TokenFile::read_some(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> tokens,
                          std::span<std::int32_t> targets) const {
  with_width([&]<class T>(T) {
    std::vector<T> raw(std::max(tokens.size(), targets.size()));
    read_raw<T>(first, raw);
    std::vector<bool> is_masked;
    if (keeps_documents() && !targets.empty()) {
      for (const T token : raw) is_masked.push_back((token & kNotLearned) != 0);
    }
    if (keeps_documents()) clear_marks<T>(raw);
    check_below<T>(raw, first, vocab, path());
    for (const std::span<std::int32_t> out : {tokens, targets}) {
      if (out.empty()) continue;
      std::ranges::transform(raw, out.begin(), [](T t) { return static_cast<std::int32_t>(t); });
    }
    for (std::size_t i = 0; i < is_masked.size(); ++i) {
      if (is_masked[i]) targets[i] = kMasked;
    }
  });
}

std::int64_t TokenFile::check_tokens(std::int64_t vocab) const {
  if (is_bytes() && vocab >= 256) return max_possible_token();
  std::int64_t max = 0;
  with_width([&]<class T>(T) {
    std::vector<T> raw(static_cast<std::size_t>(std::min(kChunk, num_tokens_)));
    for (std::int64_t first = 0; first < num_tokens_; first += kChunk) {
      const auto part =
          std::span(raw).first(static_cast<std::size_t>(std::min(kChunk, num_tokens_ - first)));
      read_raw<T>(first, part);
      if (keeps_documents()) clear_marks<T>(part);
      max = std::max(max, check_below<T>(part, first, vocab, path()));
    }
  });
  return max;
}

}  // namespace tessera::tools
