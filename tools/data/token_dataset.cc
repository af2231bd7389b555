#include "tools/data/token_dataset.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tools/data/permutation.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

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
  std::int64_t num_sequences = (file_.num_tokens() - 1) / options_.seq;
  if (!file_.keeps_documents()) {
    require<IoError>(num_sequences >= 1,
                     "[token_dataset] expected at least {} tokens for a sequence of {} and its "
                     "targets, got {}: give more data or a shorter --model.seq (model.seq, {})",
                     options_.seq + 1, options_.seq, file_.num_tokens(), file_.path());
  } else {
    cut_documents();
    num_sequences = std::ssize(pieces_);
  }
  if (options_.val_fraction > 0) {
    const double wanted = static_cast<double>(num_sequences) * options_.val_fraction;
    num_val_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(wanted));
  }
  num_train_ = num_sequences - num_val_;
  require<IoError>(num_train_ >= 1 || keeps_documents(),
                   "[token_dataset] expected at least {} tokens for training and validation "
                   "sequences of {}, got {}: give more data or a shorter --model.seq (model.seq, "
                   "data.val_fraction, {})",
                   2 * options_.seq + 1, options_.seq, file_.num_tokens(), file_.path());
  require<IoError>(num_train_ >= 1,
                   "[token_dataset] expected documents for training and validation, got one "
                   "sequence of {}: give more data, or --data.val_fraction=0 (data.val_fraction, "
                   "{})",
                   options_.seq, file_.path());
  max_token_ = file_.check_tokens(options_.vocab);
  if (!keeps_documents()) return;
  for (std::int64_t i = 0; i < num_train_; ++i) {
    cut_.num_targets += pieces_[static_cast<std::size_t>(i)].num_targets;
    cut_.num_tokens += pieces_[static_cast<std::size_t>(i)].numel;
  }
}

void TokenDataset::cut_documents() {
  std::int64_t first = 0;
  std::vector<std::int64_t> lengths;
  for (const std::int64_t end : file_.document_ends()) {
    lengths.push_back(end - first);
    cut_.num_longer += end - 1 - first > options_.seq ? 1 : 0;
    // The last token of a document is a target alone.
    while (first + 1 < end) {
      const std::int64_t numel = std::min(options_.seq, end - 1 - first);
      pieces_.push_back({first, static_cast<std::int32_t>(numel), 0});
      first += numel;
    }
    first = end;
  }
  count_targets();
  const std::int64_t num_learned = keep_learned();
  cut_.num_documents = std::ssize(lengths);
  cut_.num_not_learned = cut_.num_documents - num_learned;
  const auto most = lengths.begin() + std::ssize(lengths) * 9 / 10;
  std::ranges::nth_element(lengths, most);
  cut_.most = *most;
  cut_.longest = *std::max_element(most, lengths.end());
  require<IoError>(!pieces_.empty(),
                   "[token_dataset] expected documents of which some token after the first is "
                   "learned, got none ({})",
                   file_.path());
}

// Leaves out parts of which nothing is learned. Returns of how many documents something is.
std::int64_t TokenDataset::keep_learned() {
  std::int64_t num_learned = 0;
  std::vector<Piece> kept;
  auto piece = pieces_.begin();
  for (const std::int64_t end : file_.document_ends()) {
    const auto begin = piece;
    while (piece != pieces_.end() && piece->first < end) ++piece;
    const std::size_t num_before = kept.size();
    std::copy_if(begin, piece, std::back_inserter(kept),
                 [](const Piece& p) { return p.num_targets > 0; });
    if (kept.size() == num_before) continue;
    ++num_learned;
    cut_.num_left_out += (piece - begin) - static_cast<std::int64_t>(kept.size() - num_before);
  }
  pieces_ = std::move(kept);
  return num_learned;
}

// In one pass over the file.
void TokenDataset::count_targets() {
  constexpr std::int64_t kChunk = 1 << 19;  // tokens read at a time
  std::vector<std::int32_t> targets;
  auto piece = pieces_.begin();
  for (std::int64_t at = 0; at < file_.num_tokens(); at += std::ssize(targets)) {
    targets.resize(static_cast<std::size_t>(std::min(kChunk, file_.num_tokens() - at)));
    file_.read_targets(at, options_.vocab, targets);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const std::int64_t position = at + static_cast<std::int64_t>(i);
      while (piece != pieces_.end() && position > piece->first + piece->numel) ++piece;
      if (piece == pieces_.end()) return;
      if (position > piece->first && targets[i] != kMasked) ++piece->num_targets;
    }
  }
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
    read_sequence(sequence_of(first + i), tokens.subspan(row, seq), targets.subspan(row, seq));
  }
}

void TokenDataset::read_sequence(std::int64_t i, std::span<std::int32_t> tokens,
                                 std::span<std::int32_t> targets) const {
  if (!keeps_documents()) {
    const std::int64_t start = i * options_.seq;
    // The tokens are the targets but for the first one.
    file_.read(start, options_.vocab, tokens.first(1));
    file_.read(start + 1, options_.vocab, targets);
    std::ranges::copy(targets.first(targets.size() - 1), tokens.begin() + 1);
    return;
  }
  const Piece& piece = pieces_[static_cast<std::size_t>(i)];
  const auto numel = static_cast<std::size_t>(piece.numel);
  file_.read(piece.first, options_.vocab, tokens.first(numel));
  file_.read_targets(piece.first + 1, options_.vocab, targets.first(numel));
  const auto num_targets = piece.numel - std::ranges::count(targets.first(numel), kMasked);
  require<IoError>(num_targets == piece.num_targets,
                   "[token_dataset] expected {} tokens to learn from position {} on, as when "
                   "training began, got {} ({})",
                   piece.num_targets, piece.first, num_targets, file_.path());
  std::ranges::fill(tokens.subspan(numel), 0);
  std::ranges::fill(targets.subspan(numel), kMasked);
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

std::int64_t TokenDataset::num_targets_of_sequence(std::int64_t i) const {
  return keeps_documents() ? pieces_[static_cast<std::size_t>(i)].num_targets : options_.seq;
}

std::int64_t TokenDataset::num_targets(std::int64_t first_sample, std::int64_t batch) const {
  std::int64_t sum = 0;
  for (std::int64_t i = first_sample; i < first_sample + batch; ++i)
    sum += num_targets_of_sequence(train_sequence(i));
  return sum;
}

std::int64_t TokenDataset::num_val_targets(std::int64_t first, std::int64_t batch) const {
  std::int64_t sum = 0;
  for (std::int64_t i = first; i < first + batch; ++i)
    sum += num_targets_of_sequence(num_train_ + i);
  return sum;
}

}  // namespace tessera::tools
