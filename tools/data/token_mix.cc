#include "tools/data/token_mix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {
namespace {

using engine::require;
using Span = std::span<std::int32_t>;

// Tokens, targets and positions; the last may be missing.
std::array<Span, 3> spans_of(std::span<const engine::Tensor> host) {
  require(host.size() == 2 || host.size() == 3,
          "[token_dataset] expected tokens, targets and with packing positions, got {} tensors",
          host.size());
  std::array<Span, 3> spans;
  for (std::size_t i = 0; i < host.size(); ++i) spans[i] = host[i].span<std::int32_t>();
  return spans;
}

// Calls `fill` with i and the row of it, for each of `batch` rows.
template <class Fill>
void for_rows(std::int64_t batch, std::int64_t seq, const std::array<Span, 3>& spans, Fill fill) {
  const auto width = static_cast<std::size_t>(seq);
  const std::size_t numel = static_cast<std::size_t>(std::max<std::int64_t>(batch, 0)) * width;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    require(spans[i].size() == numel || (i == 2 && spans[i].empty()),
            "[token_dataset] expected room for {} x {} tokens and as many targets, got {}", batch,
            seq, spans[i].size());
  }
  for (std::int64_t i = 0; i < batch; ++i) {
    const auto row = [&](Span span) {
      return span.empty() ? span : span.subspan(static_cast<std::size_t>(i) * width, width);
    };
    fill(i, row(spans[0]), row(spans[1]), row(spans[2]));
  }
}

}  // namespace

TokenMix::TokenMix(std::vector<TokenDataset> sources, std::span<const double> weights,
                   std::uint64_t seed)
    : sources_(std::move(sources)), order_(weights, seed) {
  require(sources_.size() == weights.size(),
          "[mix] expected as many weights as sources, got {} of {}", weights.size(),
          sources_.size());
  for (const TokenDataset& source : sources_) {
    require(source.seq() == seq() && source.packs() == packs(),
            "[mix] expected sources in sequences of {}, got {} ({})", seq(), source.seq(),
            source.file().path());
  }
}

bool TokenMix::keeps_documents() const {
  return std::ranges::any_of(sources_, &TokenDataset::keeps_documents);
}

std::int64_t TokenMix::max_possible_token() const {
  std::int64_t max = 0;
  for (const TokenDataset& source : sources_)
    max = std::max(max, source.file().max_possible_token());
  return max;
}

std::int64_t TokenMix::num_sequences() const {
  std::int64_t sum = 0;
  for (const TokenDataset& source : sources_) sum += source.num_sequences();
  return sum;
}

std::int64_t TokenMix::mean_length() const {
  double sum = 0;
  for (std::size_t k = 0; k < sources_.size(); ++k)
    sum += share(k) * static_cast<double>(sources_[k].mean_length());
  return std::llround(sum);
}

std::int64_t TokenMix::num_val_sequences() const {
  std::int64_t sum = 0;
  for (const TokenDataset& source : sources_) sum += source.num_val_sequences();
  return sum;
}

std::string TokenMix::text() const {
  if (sources_.size() == 1) return sources_.front().file().path();
  std::string text;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    text +=
        fmt::format("{}{:.1f}% {}", i == 0 ? "" : ", ", 100 * share(i), sources_[i].file().path());
  }
  return text;
}

MixOrder::Place TokenMix::val_place(std::int64_t i) const {
  std::size_t source = 0;
  while (source + 1 < sources_.size() && i >= sources_[source].num_val_sequences())
    i -= sources_[source++].num_val_sequences();
  return {source, i};
}

void TokenMix::batch(std::int64_t first_sample, std::int64_t batch, Span tokens, Span targets,
                     Span positions) const {
  require(first_sample >= 0 && batch >= 0,
          "[token_dataset] expected sample and batch from 0 on, got {}, {}", first_sample, batch);
  for_rows(batch, seq(), {tokens, targets, positions},
           [&](std::int64_t i, Span row_tokens, Span row_targets, Span row_positions) {
             const auto [source, sample] = place(first_sample + i);
             sources_[source].batch(sample, 1, row_tokens, row_targets, row_positions);
           });
}

void TokenMix::val_batch(std::int64_t first, std::int64_t batch, Span tokens, Span targets,
                         Span positions) const {
  for_rows(batch, seq(), {tokens, targets, positions},
           [&](std::int64_t i, Span row_tokens, Span row_targets, Span row_positions) {
             const auto [source, sequence] = val_place(first + i);
             sources_[source].val_batch(sequence, 1, row_tokens, row_targets, row_positions);
           });
}

void TokenMix::batch(std::int64_t first_sample, std::int64_t batch,
                     std::span<const engine::Tensor> host) const {
  const auto [tokens, targets, positions] = spans_of(host);
  this->batch(first_sample, batch, tokens, targets, positions);
}

void TokenMix::val_batch(std::int64_t first, std::int64_t batch,
                         std::span<const engine::Tensor> host) const {
  const auto [tokens, targets, positions] = spans_of(host);
  val_batch(first, batch, tokens, targets, positions);
}

std::int64_t TokenMix::num_targets(std::int64_t first_sample, std::int64_t batch) const {
  std::int64_t sum = 0;
  for (std::int64_t i = first_sample; i < first_sample + batch; ++i) {
    const auto [source, sample] = place(i);
    sum += sources_[source].num_targets(sample, 1);
  }
  return sum;
}

std::int64_t TokenMix::num_val_targets(std::int64_t first, std::int64_t batch) const {
  std::int64_t sum = 0;
  for (std::int64_t i = first; i < first + batch; ++i) {
    const auto [source, sequence] = val_place(i);
    sum += sources_[source].num_val_targets(sequence, 1);
  }
  return sum;
}

std::string digest_of_mix(std::span<const std::string> digests,
                          std::span<const std::int64_t> quotas) {
  require(digests.size() == quotas.size(),
          "[mix] expected as many digests as quotas, got {} and {}", digests.size(), quotas.size());
  if (digests.size() == 1) return digests[0];
  std::string text;
  for (std::size_t i = 0; i < digests.size(); ++i)
    text += fmt::format("{}{} of {}", i == 0 ? "" : ", ", quotas[i], digests[i]);
  return text;
}

}  // namespace tessera::tools
