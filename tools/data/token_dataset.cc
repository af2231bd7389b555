#include "tools/data/token_dataset.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
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
    pieces_ = cut_documents(file_, options_.seq, options_.vocab, cut_);
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
  cut_.num_pieces = num_train_;
  for (std::int64_t i = 0; i < num_train_; ++i) {
    cut_.num_targets += pieces_[static_cast<std::size_t>(i)].num_targets;
    cut_.num_tokens += pieces_[static_cast<std::size_t>(i)].numel;
  }
  if (options_.packing) pack();
}

// Training's and validation's pieces apart, so that both have the documents that they have without.
void TokenDataset::pack() {
  const auto middle = pieces_.begin() + num_train_;
  std::vector<Piece> train(pieces_.begin(), middle), val(middle, pieces_.end());
  begins_ = pack_pieces(train, options_.seq);
  num_train_ = std::ssize(begins_) - 1;
  const std::vector<std::int64_t> val_begins = pack_pieces(val, options_.seq);
  num_val_ = std::ssize(val_begins) - 1;
  for (const std::int64_t begin : std::span(val_begins).subspan(1))
    begins_.push_back(std::ssize(train) + begin);
  pieces_ = std::move(train);
  pieces_.insert(pieces_.end(), val.begin(), val.end());
}

std::int64_t TokenDataset::train_sequence(std::int64_t sample) const {
  const std::int64_t index = sample % num_train_;
  if (options_.order == SampleOrder::kSequential) return index;
  return permuted(index, num_train_, options_.seed,
                  static_cast<std::uint64_t>(sample / num_train_));
}

template <class SequenceOf>
void TokenDataset::fill(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                        std::span<std::int32_t> targets, std::span<std::int32_t> positions,
                        SequenceOf sequence_of) const {
  require(first >= 0 && batch >= 0,
          "[token_dataset] expected sample and batch from 0 on, got {}, {}", first, batch);
  const auto seq = static_cast<std::size_t>(options_.seq);
  const std::size_t numel = static_cast<std::size_t>(batch) * seq;
  require(tokens.size() == numel && targets.size() == numel,
          "[token_dataset] expected room for {} x {} tokens and targets, got {} and {}", batch, seq,
          tokens.size(), targets.size());
  require(positions.size() == (packs() ? numel : 0),
          "[token_dataset] expected room for {} positions, got {}", packs() ? numel : 0,
          positions.size());
  for (std::int64_t i = 0; i < batch; ++i) {
    const auto row = static_cast<std::size_t>(i) * seq;
    read_sequence(sequence_of(first + i), tokens.subspan(row, seq), targets.subspan(row, seq),
                  packs() ? positions.subspan(row, seq) : positions);
  }
}

std::int64_t TokenDataset::mean_length() const {
  if (begins_.empty()) return options_.seq;
  double sum = 0;
  const std::span<const Piece> train = std::span(pieces_).first(
      static_cast<std::size_t>(begins_[static_cast<std::size_t>(num_train_)]));
  for (const Piece& piece : train) sum += static_cast<double>(piece.numel) * piece.numel;
  return std::llround(sum / static_cast<double>(cut_.num_tokens));
}

std::span<const Piece> TokenDataset::pieces_of(std::int64_t sequence) const {
  const auto i = static_cast<std::size_t>(sequence);
  if (begins_.empty()) return std::span(pieces_).subspan(i, 1);
  return std::span(pieces_).subspan(static_cast<std::size_t>(begins_[i]),
                                    static_cast<std::size_t>(begins_[i + 1] - begins_[i]));
}

// Of any file.
std::vector<Piece> TokenDataset::all_pieces_of(std::int64_t sequence) const {
  if (!keeps_documents()) {
    const auto seq = static_cast<std::int32_t>(options_.seq);
    return {{sequence * options_.seq, seq, seq}};
  }
  const std::span<const Piece> pieces = pieces_of(sequence);
  return {pieces.begin(), pieces.end()};
}

std::vector<Piece> TokenDataset::pieces(std::int64_t sample) const {
  require(sample >= 0, "[token_dataset] expected a sample from 0 on, got {}", sample);
  return all_pieces_of(train_sequence(sample));
}

std::vector<Piece> TokenDataset::val_pieces(std::int64_t i) const {
  require(i >= 0 && i < num_val_, "[token_dataset] expected validation sequences below {}, got {}",
          num_val_, i);
  return all_pieces_of(num_train_ + i);
}

void TokenDataset::read_sequence(std::int64_t i, std::span<std::int32_t> tokens,
                                 std::span<std::int32_t> targets,
                                 std::span<std::int32_t> positions) const {
  if (!keeps_documents()) {
    const std::int64_t start = i * options_.seq;
    // The tokens are the targets but for the first one.
    file_.read(start, options_.vocab, tokens.first(1));
    file_.read(start + 1, options_.vocab, targets);
    std::ranges::copy(targets.first(targets.size() - 1), tokens.begin() + 1);
    std::iota(positions.begin(), positions.end(), 0);
    return;
  }
  std::size_t at = 0;
  const auto count_positions = [&](std::size_t numel) {
    if (packs()) std::iota(positions.begin() + at, positions.begin() + at + numel, 0);
  };
  for (const Piece& piece : pieces_of(i)) {
    const auto numel = static_cast<std::size_t>(piece.numel);
    read_piece(piece, tokens.subspan(at, numel), targets.subspan(at, numel));
    count_positions(numel);
    at += numel;
  }
  std::ranges::fill(tokens.subspan(at), 0);
  std::ranges::fill(targets.subspan(at), kMasked);
  count_positions(tokens.size() - at);
}

void TokenDataset::read_piece(const Piece& piece, std::span<std::int32_t> tokens,
                              std::span<std::int32_t> targets) const {
  std::vector<std::int32_t> ids(tokens.size() + 1), learned(ids.size());
  file_.read(piece.first, options_.vocab, ids, learned);
  std::copy(ids.begin(), ids.end() - 1, tokens.begin());
  std::copy(learned.begin() + 1, learned.end(), targets.begin());
  const auto num_targets = piece.numel - std::ranges::count(targets, kMasked);
  require<IoError>(num_targets == piece.num_targets,
                   "[token_dataset] expected {} tokens to learn from position {} on, as when "
                   "training began, got {} ({})",
                   piece.num_targets, piece.first, num_targets, file_.path());
}

void TokenDataset::batch(std::int64_t first_sample, std::int64_t batch,
                         std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
                         std::span<std::int32_t> positions) const {
  fill(first_sample, batch, tokens, targets, positions,
       [&](std::int64_t sample) { return train_sequence(sample); });
}

void TokenDataset::val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                             std::span<std::int32_t> targets,
                             std::span<std::int32_t> positions) const {
  require(first + batch <= num_val_,
          "[token_dataset] expected validation sequences below {}, got {} from {} on", num_val_,
          batch, first);
  fill(first, batch, tokens, targets, positions, [&](std::int64_t i) { return num_train_ + i; });
}

std::int64_t TokenDataset::num_targets_of_sequence(std::int64_t i) const {
  if (!keeps_documents()) return options_.seq;
  std::int64_t sum = 0;
  for (const Piece& piece : pieces_of(i)) sum += piece.num_targets;
  return sum;
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
