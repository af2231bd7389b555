#include "tools/data/data_fit.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

constexpr std::size_t kHeadNbytes = 8192;
constexpr std::int64_t kNumBytes = 256, kNumUInt16 = 1 << 16;
constexpr std::int64_t kMostOfBytes = 512;  // bytes, and tokens for ends and the like
constexpr const char* kAsItIs = "or train on its bytes as they are with --data.format=bytes";

bool is_text(std::string_view head) {
  constexpr std::size_t kEnough = 32;  // as many bytes of ids are never all letters
  const std::string_view text = engine::without_cut_character(head);
  const bool has_control = std::ranges::any_of(text, [](char c) {
    return static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\r' && c != '\t' && c != '\f';
  });
  return text.size() >= kEnough && !has_control && engine::is_utf8(text);
}

/// How many bytes the numbers in `head` seem to have, little-endian and of `nbytes` or more: those
/// above an id's own are zero, or nearly, as no vocabulary has 2^18 tokens.
std::int64_t likely_nbytes(std::string_view head, std::int64_t nbytes) {
  constexpr std::uint32_t kSmall = 3, kId = 16;
  constexpr std::size_t kEnough = 8;  // numbers
  for (const std::int64_t wide : {std::int64_t{8}, std::int64_t{4}}) {
    const auto width = static_cast<std::size_t>(wide);
    if (wide <= nbytes || head.size() < kEnough * width) continue;
    std::uint32_t max_low = 0, max_high = 0;
    std::size_t num = 0, num_above_zero = 0;
    bool rest_is_zero = true;
    for (std::size_t at = 0; at + width <= head.size(); at += width) {
      std::uint16_t parts[4] = {};
      std::memcpy(parts, head.data() + at, width);
      ++num;
      num_above_zero += parts[0] > 0 ? 1 : 0;
      max_low = std::max<std::uint32_t>(max_low, parts[0]);
      max_high = std::max<std::uint32_t>(max_high, parts[1]);
      rest_is_zero = rest_is_zero && parts[2] == 0 && parts[3] == 0;
    }
    const bool are_ids = max_low >= kId && 2 * num_above_zero >= num;
    if (are_ids && max_high <= kSmall && rest_is_zero) return wide;
  }
  return nbytes;
}

void check_bytes(const TokenFile& file, std::string_view head, const DataFit& fit) {
  require<IoError>(!head.starts_with("\xff\xfe") && !head.starts_with("\xfe\xff"),
                   "[data] expected text in UTF-8, got UTF-16: convert it with `iconv -f UTF-16 -t "
                   "UTF-8`, {} ({}, {})",
                   kAsItIs, fit.option, file.path());
  require<IoError>(head.find('\0') == std::string_view::npos,
                   "[data] expected text, got a binary file: if it holds token ids, give "
                   "--data.format=uint16 or uint32, {} ({}, {})",
                   kAsItIs, fit.option, file.path());
  require<IoError>(fit.tokenizes || fit.init_from.empty() || fit.vocab <= kMostOfBytes,
                   "[data] expected the model's tokenizer in its folder, got text, whose bytes are "
                   "none of its {} tokens, and no tokenizer: give --data.tokenizer, or, if the "
                   "model was trained on bytes, --data.format=bytes ({}, {}; init.from={})",
                   fit.vocab, fit.option, file.path(), fit.init_from);
}

void check_ids(const TokenFile& file, std::string_view head, const DataFit& fit) {
  require<IoError>(!is_text(head),
                   "[data] expected token ids of 16 bits, got text: give --data.format=bytes, or "
                   "name the file .txt ({}, {})",
                   fit.option, file.path());
  require<IoError>(
      likely_nbytes(head, file.token_nbytes()) == file.token_nbytes(),
      "[data] expected token ids of 16 bits, got what looks like 32: give --data.format=uint32, or "
      "uint16 if they are of 16 ({}, {})",
      fit.option, file.path());
  require<IoError>(fit.vocab <= kNumUInt16,
                   "[data] expected token ids that reach the vocabulary of {}, got 16 bits, which "
                   "end at {}: give --data.format=uint32 if that is what they are, uint16 if 16 "
                   "bits are meant, or another --model.vocab (model.vocab, {}, {})",
                   fit.vocab, kNumUInt16 - 1, fit.option, file.path());
}

}  // namespace

bool are_tokens_bytes(const TokenFile& file, const DataFit& fit) {
  return file.is_bytes() && !(fit.tokenizes && fit.format == TokenFormat::kAuto);
}

void check_data_fit(const TokenFile& file, const DataFit& fit) {
  if (fit.format == TokenFormat::kBytes) return;
  const std::string head = file.head(kHeadNbytes);
  // In no format that is read here, whatever was asked for.
  require<IoError>(file.is_bytes() || file.has_header() || fit.format == TokenFormat::kUInt16 ||
                       likely_nbytes(head, file.token_nbytes()) != 8,
                   "[data] expected token ids of 16 or 32 bits, got what looks like 64: write them "
                   "again, with numpy as ids.astype('uint16').tofile(...) ({}, {})",
                   fit.option, file.path());
  if (fit.format != TokenFormat::kAuto) return;
  if (file.is_bytes()) return check_bytes(file, head, fit);
  if (!file.has_header()) check_ids(file, head, fit);
}

void check_mix_fit(std::span<const TokenFile> files, const DataFit& fit, bool packing) {
  for (const TokenFile& file : files) {
    check_data_fit(file, fit);
    const TokenFile& first = files.front();
    require<IoError>(are_tokens_bytes(first, fit) == are_tokens_bytes(file, fit),
                     "[data] expected sources of one kind of tokens, got {} in {} and {} in {}: "
                     "give --data.tokenizer, which makes those of the text (data.mix)",
                     first.format(), first.path(), file.format(), file.path());
  }
  require(!packing || files.empty() || std::ranges::any_of(files, &TokenFile::keeps_documents),
          "[data] expected documents to pack, got {}: a .jsonl keeps them apart, and a file that "
          "//tools:tokenize writes with --documents, --prompt or --template (data.packing, {})",
          files.empty() ? "" : files.front().format(), files.empty() ? "" : files.front().path());
}

std::vector<std::string> data_warnings(const TokenFile& file, const DataFit& fit,
                                       std::int64_t max_token) {
  if (max_token == 0) return {"every token of the data is 0: has the file been written?"};
  if (file.is_bytes() && fit.format == TokenFormat::kAuto && !fit.init_from.empty() &&
      fit.vocab > kNumBytes) {
    return {
        fmt::format("the model of init.from has {} tokens, and the text is read as bytes, 256: "
                    "if it was not trained on bytes, give its tokenizer as --data.tokenizer; if it "
                    "was, --data.format=bytes says so",
                    fit.vocab)};
  }
  constexpr std::int64_t kMany = 1000;  // tokens that a small file may well lack
  const std::int64_t vocab = fit.vocab;
  if (vocab <= 2 * (max_token + 1) || vocab - max_token <= kMany) return {};
  const std::string tokens = engine::with_commas(vocab);
  if (file.is_bytes()) {
    return {
        fmt::format("the model has {} tokens, and bytes of text are 255 at most: give "
                    "--model.vocab=256, or a tokenizer as --data.tokenizer",
                    tokens)};
  }
  return {fmt::format(
      "the model has {} tokens, and the data none above {}: is --model.vocab their tokenizer's?",
      tokens, engine::with_commas(max_token))};
}

std::string sequences_text(const TokenDataset& data) {
  const DocumentCut& cut = data.cut();
  std::string text = fmt::format("{} sequences of {}", data.num_sequences(), data.seq());
  if (!data.keeps_documents()) return text;
  const auto positions = static_cast<double>(data.num_sequences() * data.seq());
  text += data.packs()
              ? fmt::format(" that {} documents and parts are packed into, {:.1f}% padding",
                            engine::with_commas(cut.num_pieces),
                            100 * (1 - static_cast<double>(cut.num_tokens) / positions))
              : " at most";
  return text + fmt::format("; of {} tokens {} are learned", engine::with_commas(cut.num_tokens),
                            engine::with_commas(cut.num_targets));
}

namespace {

// Of data that keep documents apart.
std::vector<std::string> document_warnings(const TokenDataset& data) {
  constexpr std::int64_t kManyPositions = 4;  // for each token
  if (!data.keeps_documents()) return {};
  const DocumentCut& cut = data.cut();
  std::vector<std::string> lines;
  if (cut.num_not_learned > 0) {
    lines.push_back(fmt::format(
        "{} of {} documents have no token to learn after their first, and were left out",
        engine::with_commas(cut.num_not_learned), engine::with_commas(cut.num_documents)));
  }
  if (cut.num_longer > 0) {
    lines.push_back(fmt::format(
        "{} of {} documents are longer than model.seq={} and were cut: what comes after "
        "a cut is learned without what stands before it; {} parts of which nothing is "
        "learned were left out; the longest document has {} tokens",
        engine::with_commas(cut.num_longer), engine::with_commas(cut.num_documents), data.seq(),
        engine::with_commas(cut.num_left_out), engine::with_commas(cut.longest)));
  }
  const std::int64_t positions = data.num_sequences() * data.seq();
  const bool fits = cut.longest - 1 <= data.seq();
  const std::int64_t enough = (fits ? cut.longest : cut.most) - 1;
  if (positions > kManyPositions * cut.num_tokens && enough < data.seq()) {
    lines.push_back(
        fmt::format("{} of {} positions are padding, which takes as long as tokens do: {}"
                    "--model.seq={} is enough for {}",
                    engine::with_commas(positions - cut.num_tokens), engine::with_commas(positions),
                    data.packs() ? "" : "--data.packing=true puts documents together, and ",
                    std::max<std::int64_t>(enough, 1),
                    fits ? "the longest document" : "nine documents of ten"));
  }
  return lines;
}

}  // namespace

std::string mix_text(const TokenMix& data) {
  std::string text;
  const std::size_t num = data.sources().size();
  for (std::size_t i = 0; i < num; ++i) {
    const TokenDataset& source = data.sources()[i];
    if (num > 1) text += fmt::format("{}{:.1f}% of ", i == 0 ? "" : "; ", 100 * data.share(i));
    text += fmt::format("{}, {}", engine::escaped(source.file().path()), sequences_text(source));
  }
  return text;
}

std::vector<std::string> mix_warnings(const TokenMix& data, const DataFit& fit,
                                      bool is_mean_of_means) {
  std::vector<std::string> all;
  for (const TokenDataset& source : data.sources()) {
    std::vector<std::string> lines = data_warnings(source.file(), fit, source.max_token());
    for (std::string& line : document_warnings(source)) lines.push_back(std::move(line));
    for (const std::string& line : lines) {
      all.push_back(data.sources().size() == 1
                        ? line
                        : fmt::format("{}: {}", engine::escaped(source.file().path()), line));
    }
    const std::string& remark = source.file().remark();
    if (!remark.empty())
      all.push_back(fmt::format("{} {}", engine::escaped(source.file().path()), remark));
  }
  if (data.keeps_documents() && is_mean_of_means) {
    all.emplace_back(
        "the loss is the mean of the means of micro-batches, and not over tokens where these have "
        "unequally many to learn: --train.loss_mean=tokens is");
  }
  return all;
}

}  // namespace tessera::tools
