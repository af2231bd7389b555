#include "tools/data/text_data.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/data/permutation.h"
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

std::string first_bytes(const engine::InputFile& file, std::int64_t offset, std::size_t most) {
  const auto left = static_cast<std::size_t>(std::max<std::int64_t>(file.nbytes() - offset, 0));
  std::string head(std::min(most, left), '\0');
  file.read(offset, std::as_writable_bytes(std::span(head)));
  return head;
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

TokenFile::TokenFile(std::string path, TokenFormat format)
    : file_(open_tokens(std::move(path))), format_("text") {
  require<IoError>(file_.nbytes() > 0, "[token_file] expected tokens, got an empty file ({})",
                   file_.path());
  const bool is_bin = file_.path().ends_with(".bin");
  if (format == TokenFormat::kAuto) {
    const FileKind* kind = file_kind(first_bytes(file_, 0, kFileKindNbytes));
    require<IoError>(
        kind == nullptr,
        "[token_file] expected text or token ids, got {}: {}; or train on its bytes as "
        "they are with --data.format=bytes ({})",
        kind == nullptr ? "" : kind->name, kind == nullptr ? "" : kind->as_data, file_.path());
    if (is_bin) read_header(TokenFormat::kUInt16);
  } else if (format != TokenFormat::kBytes) {
    read_header(format);
    require<IoError>(header_nbytes_ == 0,
                     "[token_file] expected token ids from the first byte on, got the header of "
                     "{}: leave out --data.format ({})",
                     format_, file_.path());
  }
  const std::int64_t nbytes = file_.nbytes() - header_nbytes_;
  require<IoError>(nbytes % token_nbytes_ == 0,
                   "[token_file] expected tokens of {} bytes each, got {} bytes: the file was cut "
                   "short, or is in another --data.format, such as bytes ({})",
                   token_nbytes_, nbytes, file_.path());
  num_tokens_ = nbytes / token_nbytes_;
}

/// Sets what llm.c's header says, or what `without` one is there.
void TokenFile::read_header(TokenFormat without) {
  format_ = without == TokenFormat::kUInt16 ? "nanoGPT uint16" : "uint32";
  token_nbytes_ = without == TokenFormat::kUInt16 ? 2 : 4;
  std::array<std::int32_t, 3> header{};  // magic, version, count
  const std::string head = first_bytes(file_, 0, sizeof header);
  std::ranges::copy(head, reinterpret_cast<char*>(header.data()));
  for (const auto& format : kLlmcFormats) {
    if (header[0] != format.magic) continue;
    require<IoError>(header[1] == format.version,
                     "[token_file] expected llm.c version {} after magic {}, got {} ({})",
                     format.version, format.magic, header[1], file_.path());
    format_ = format.name;
    header_nbytes_ = kHeaderNbytes;
    token_nbytes_ = format.token_nbytes;
    const std::int64_t expected = kHeaderNbytes + header[2] * token_nbytes_;
    require<IoError>(header[2] > 0 && file_.nbytes() == expected,
                     "[token_file] expected {} bytes for the {} tokens of the header, got {} ({})",
                     expected, header[2], file_.nbytes(), file_.path());
  }
}

std::string TokenFile::head(std::size_t max_nbytes) const {
  return first_bytes(file_, header_nbytes_, max_nbytes);
}

template <class Use>
void TokenFile::with_width(Use use) const {
  if (token_nbytes_ == 1) return use(std::uint8_t{});
  if (token_nbytes_ == 2) return use(std::uint16_t{});
  use(std::uint32_t{});
}

void TokenFile::read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> out) const {
  require(first >= 0 && std::ssize(out) <= num_tokens_ - first,
          "[token_file] expected a range inside {} tokens, got [{}, {}) ({})", num_tokens_, first,
          first + std::ssize(out), path());
  with_width([&]<class T>(T) {
    std::vector<T> raw(out.size());
    file_.read(header_nbytes_ + first * token_nbytes_, std::as_writable_bytes(std::span(raw)));
    check_below<T>(raw, first, vocab, path());
    std::ranges::transform(raw, out.begin(), [](T t) { return static_cast<std::int32_t>(t); });
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
      file_.read(header_nbytes_ + first * token_nbytes_, std::as_writable_bytes(part));
      max = std::max(max, check_below<T>(part, first, vocab, path()));
    }
  });
  return max;
}

TokenDataset::TokenDataset(TokenFile file, const TokenDatasetOptions& options)
    : file_(std::move(file)), options_(options) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  require(options_.seq >= 1 && options_.seq < kMax,
          "[token_dataset] expected a sequence length in [1, 2^31), got {}", options_.seq);
  require(options_.vocab >= 1 && options_.vocab <= kMax,
          "[token_dataset] expected a vocabulary in [1, 2^31], got {}", options_.vocab);
  require(options_.val_fraction >= 0 && options_.val_fraction < 1,
          "[token_dataset] expected a validation fraction in [0, 1), got {}",
          options_.val_fraction);
  const std::int64_t num_tokens = file_.num_tokens();
  require<IoError>(num_tokens > options_.seq,
                   "[token_dataset] expected at least {} tokens for a sequence of {} and its "
                   "targets, got {}: give more data or a shorter --model.seq (model.seq, {})",
                   options_.seq + 1, options_.seq, num_tokens, file_.path());
  const std::int64_t num_sequences = (num_tokens - 1) / options_.seq;
  if (options_.val_fraction > 0) {
    const double wanted = static_cast<double>(num_sequences) * options_.val_fraction;
    num_val_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(wanted));
  }
  num_train_ = num_sequences - num_val_;
  require<IoError>(num_train_ >= 1,
                   "[token_dataset] expected at least {} tokens for training and validation "
                   "sequences of {}, got {}: give more data or a shorter --model.seq (model.seq, "
                   "data.val_fraction, {})",
                   2 * options_.seq + 1, options_.seq, num_tokens, file_.path());
  max_token_ = file_.check_tokens(options_.vocab);
}

std::int64_t TokenDataset::train_sequence(std::int64_t sample) const {
  const std::int64_t index = sample % num_train_;
  if (options_.order == SampleOrder::kSequential) return index;
  return permuted(index, num_train_, options_.seed,
                  static_cast<std::uint64_t>(sample / num_train_));
}

template <class SequenceOf>
void TokenDataset::fill(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                        std::span<std::int32_t> targets, SequenceOf sequence_of) const {
  require(first >= 0 && batch >= 0,
          "[token_dataset] expected sample and batch from 0 on, got {}, {}", first, batch);
  const auto seq = static_cast<std::size_t>(options_.seq);
  const std::size_t numel = static_cast<std::size_t>(batch) * seq;
  require(tokens.size() == numel && targets.size() == numel,
          "[token_dataset] expected room for {} x {} tokens and targets, got {} and {}", batch, seq,
          tokens.size(), targets.size());
  for (std::int64_t i = 0; i < batch; ++i) {
    const auto row = static_cast<std::size_t>(i) * seq;
    const auto inputs = tokens.subspan(row, seq), outputs = targets.subspan(row, seq);
    const std::int64_t start = sequence_of(first + i) * options_.seq;
    // The inputs are the targets but for the first token.
    file_.read(start, options_.vocab, inputs.first(1));
    file_.read(start + 1, options_.vocab, outputs);
    std::ranges::copy(outputs.first(seq - 1), inputs.begin() + 1);
  }
}

void TokenDataset::batch(std::int64_t first_sample, std::int64_t batch,
                         std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const {
  fill(first_sample, batch, tokens, targets,
       [&](std::int64_t sample) { return train_sequence(sample); });
}

void TokenDataset::val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                             std::span<std::int32_t> targets) const {
  require(first + batch <= num_val_,
          "[token_dataset] expected validation sequences below {}, got {} from {} on", num_val_,
          batch, first);
  fill(first, batch, tokens, targets, [&](std::int64_t i) { return num_train_ + i; });
}

}  // namespace tessera::tools
