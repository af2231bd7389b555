#include "shard/hooks/low_rank_layout.h"

#include <algorithm>
#include <cmath>

#include "engine/error.h"

namespace tessera::shard {

using engine::require;

namespace {

// The smallest s with s * s >= n.
std::int64_t square_side(std::int64_t n) {
  auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(n)));
  while (side * side < n) ++side;
  while (side > 0 && (side - 1) * (side - 1) >= n) --side;
  return side;
}

bool pays(std::int64_t rows, std::int64_t cols, std::int64_t rank, double min_rate) {
  if (rank < 1) return false;  // of nothing
  return static_cast<double>((rows + cols) * rank) * min_rate <
         static_cast<double>(rows) * static_cast<double>(cols);
}

// The elements of [begin, begin + numel) that lie in `held`, counted from `begin`.
Range part_in(const Range& held, std::int64_t begin, std::int64_t numel) {
  const std::int64_t first = std::max(held.begin, begin);
  const std::int64_t end = std::min(held.begin + held.numel, begin + numel);
  return {first - begin, std::max<std::int64_t>(end - first, 0)};
}

}  // namespace

void LowRankLayout::add_matrix(std::size_t parameter, std::int64_t rows, std::int64_t cols,
                               std::int64_t rank, const Range& held) {
  const std::int64_t row_begin = held.numel == 0 ? 0 : held.begin / cols;
  const std::int64_t row_end = held.numel == 0 ? 0 : (held.begin + held.numel + cols - 1) / cols;
  const LowRankMatrix m{.parameter = parameter,
                        .rows = rows,
                        .cols = cols,
                        .rank = rank,
                        .row_begin = row_begin,
                        .num_rows = row_end - row_begin,
                        .begin = held.numel == 0 ? 0 : held.begin - row_begin * cols,
                        .numel = held.numel,
                        .input = input_numel_,
                        .p = p_numel_,
                        .q = q_numel_};
  const std::int64_t numel = m.num_rows * cols;
  input_numel_ += (numel + kAlignmentNumel - 1) / kAlignmentNumel * kAlignmentNumel;
  max_numel_ = std::max(max_numel_, numel);
  p_numel_ += rows * rank;
  q_numel_ += cols * rank;
  matrices_.push_back(m);
}

LowRankLayout::LowRankLayout(std::span<const engine::Shape> shapes, const Layout& layout,
                             const Range& held, const LowRankOptions& options) {
  require(options.rank >= 1, "[powersgd] expected a rank of at least 1, got {}", options.rank);
  require(options.min_compression_rate >= 0,
          "[powersgd] expected a min_compression_rate of at least 0, got {}",
          options.min_compression_rate);
  const auto held_of = [&](std::size_t i) {
    return part_in(held, layout.offset(i), layout.numel(i));
  };
  if (options.batched) {
    const std::int64_t side = square_side(layout.value_numel());
    const std::int64_t rank = std::min(options.rank, side);
    // What a rank holds is contiguous: padding between parameters is left out.
    Range values{0, 0};
    std::int64_t packed = 0;
    const bool compresses = pays(side, side, rank, options.min_compression_rate);
    for (std::size_t i = 0; i < shapes.size(); packed += layout.numel(i), ++i) {
      const Range mine = held_of(i);
      if (mine.numel > 0 && values.numel == 0) values.begin = packed + mine.begin;
      values.numel += mine.numel;
    }
    if (compresses) add_matrix(0, side, side, rank, values);
    packed = 0;
    const double share =
        2.0 * static_cast<double>(side * rank) / static_cast<double>(layout.value_numel());
    for (std::size_t i = 0; i < shapes.size(); packed += layout.numel(i), ++i) {
      const auto numel = static_cast<double>(layout.numel(i));
      sent_.push_back(compresses ? Sent{rank, numel * share} : Sent{0, numel});
    }
  } else {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const std::int64_t numel = layout.numel(i);
      const std::int64_t rows = numel == 0 || shapes[i].rank() == 0 ? 0 : shapes[i].dim(0);
      const std::int64_t cols = rows == 0 ? 0 : numel / rows;
      const std::int64_t rank = std::min({options.rank, rows, cols});
      const bool compresses =
          shapes[i].rank() > 1 && pays(rows, cols, rank, options.min_compression_rate);
      if (compresses) add_matrix(i, rows, cols, rank, held_of(i));
      sent_.push_back(compresses ? Sent{rank, static_cast<double>((rows + cols) * rank)}
                                 : Sent{0, static_cast<double>(numel)});
    }
  }
  message_numel_ = p_numel_;
  std::size_t matrix = 0;
  std::int64_t packed = 0;  // in the matrix
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const bool compresses = sent_[i].rank > 0;
    const Range mine = held_of(i);
    LowRankPiece piece{.parameter = i,
                       .parameter_begin = mine.begin,
                       .flat = layout.offset(i) + mine.begin,
                       .numel = mine.numel,
                       .matrix = {},
                       .at = message_numel_ + mine.begin};
    if (compresses) {
      const LowRankMatrix& m = matrices_[matrix];
      piece.matrix = matrix;
      piece.at = m.input + packed + mine.begin - m.row_begin * m.cols;
      if (options.batched) packed += layout.numel(i);
      if (!options.batched) ++matrix;
    } else {
      message_numel_ += layout.numel(i);
    }
    if (mine.numel > 0) pieces_.push_back(piece);
  }
}

}  // namespace tessera::shard
