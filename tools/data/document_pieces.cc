#include "tools/data/document_pieces.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "engine/error.h"
#include "tools/data/first_fit.h"

namespace tessera::tools {
namespace {

// In one pass over the file.
void count_targets(const TokenFile& file, std::int64_t vocab, std::vector<Piece>& pieces) {
  constexpr std::int64_t kChunk = 1 << 19;  // tokens read at a time
  std::vector<std::int32_t> targets;
  auto piece = pieces.begin();
  for (std::int64_t at = 0; at < file.num_tokens(); at += std::ssize(targets)) {
    targets.resize(static_cast<std::size_t>(std::min(kChunk, file.num_tokens() - at)));
    file.read_targets(at, vocab, targets);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const std::int64_t position = at + static_cast<std::int64_t>(i);
      while (piece != pieces.end() && position > piece->first + piece->numel) ++piece;
      if (piece == pieces.end()) return;
      if (position > piece->first && targets[i] != kMasked) ++piece->num_targets;
    }
  }
}

// Leaves out pieces of which nothing is learned. Returns of how many documents something is.
std::int64_t keep_learned(const TokenFile& file, std::vector<Piece>& pieces, DocumentCut& cut) {
  std::int64_t num_learned = 0;
  std::vector<Piece> kept;
  auto piece = pieces.begin();
  for (const std::int64_t end : file.document_ends()) {
    const auto begin = piece;
    while (piece != pieces.end() && piece->first < end) ++piece;
    const std::size_t num_before = kept.size();
    std::copy_if(begin, piece, std::back_inserter(kept),
                 [](const Piece& p) { return p.num_targets > 0; });
    if (kept.size() == num_before) continue;
    ++num_learned;
    cut.num_left_out += (piece - begin) - static_cast<std::int64_t>(kept.size() - num_before);
  }
  pieces = std::move(kept);
  return num_learned;
}

}  // namespace

std::vector<Piece> cut_documents(const TokenFile& file, std::int64_t seq, std::int64_t vocab,
                                 DocumentCut& cut) {
  std::int64_t first = 0;
  std::vector<Piece> pieces;
  std::vector<std::int64_t> lengths;
  for (const std::int64_t end : file.document_ends()) {
    lengths.push_back(end - first);
    cut.num_longer += end - 1 - first > seq ? 1 : 0;
    // The last token of a document is a target alone.
    while (first + 1 < end) {
      const std::int64_t numel = std::min(seq, end - 1 - first);
      pieces.push_back({first, static_cast<std::int32_t>(numel), 0});
      first += numel;
    }
    first = end;
  }
  count_targets(file, vocab, pieces);
  const std::int64_t num_learned = keep_learned(file, pieces, cut);
  cut.num_documents = std::ssize(lengths);
  cut.num_not_learned = cut.num_documents - num_learned;
  const auto most = lengths.begin() + std::ssize(lengths) * 9 / 10;
  std::ranges::nth_element(lengths, most);
  cut.most = *most;
  cut.longest = *std::max_element(most, lengths.end());
  engine::require<engine::IoError>(
      !pieces.empty(),
      "[token_dataset] expected documents of which some token after the first is learned, got none "
      "({})",
      file.path());
  return pieces;
}

std::vector<std::int64_t> pack_pieces(std::vector<Piece>& pieces, std::int64_t seq) {
  std::vector<std::int32_t> sizes;
  sizes.reserve(pieces.size());
  for (const Piece& piece : pieces) sizes.push_back(piece.numel);
  const std::vector<std::int64_t> bins = first_fit(sizes, seq);
  // Sorted by counting, which leaves the order within a bin as it is.
  const std::int64_t num_bins = bins.empty() ? 0 : *std::ranges::max_element(bins) + 1;
  std::vector<std::int64_t> begins(static_cast<std::size_t>(num_bins) + 1);
  for (const std::int64_t bin : bins) ++begins[static_cast<std::size_t>(bin) + 1];
  for (std::size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
  std::vector<std::int64_t> next = begins;
  std::vector<Piece> packed(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    packed[static_cast<std::size_t>(next[static_cast<std::size_t>(bins[i])]++)] = pieces[i];
  }
  pieces = std::move(packed);
  return begins;
}

}  // namespace tessera::tools
