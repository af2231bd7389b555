#include "tools/decoding/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "engine/error.h"

namespace tessera::tools {

namespace {

float at(std::span<const float> logits, std::int32_t token) {
  return logits[static_cast<std::size_t>(token)];
}

std::int32_t likeliest(std::span<const float> logits) {
  std::int32_t best = 0;
  bool has_nan = false;
  for (std::int32_t token = 0; token < std::ssize(logits); ++token) {
    if (at(logits, token) > at(logits, best)) best = token;
    has_nan |= std::isnan(at(logits, token));
  }
  engine::require(!has_nan && std::isfinite(at(logits, best)),
                  "[generate] expected logits that are numbers, got {}",
                  has_nan ? "NaN" : "an infinite one as the largest");
  return best;
}

}  // namespace

std::int32_t Sampler::next(std::span<const float> logits, std::int64_t place) {
  const std::int32_t best = likeliest(logits);
  if (sampling_.temperature == 0) return best;
  return draw(logits, at(logits, best), random_.uniform(static_cast<std::uint64_t>(place)));
}

// Nothing sorts the vocabulary: the k likeliest are set apart, and then the likeliest of those
// taken from a heap, no more than are needed.
std::int32_t Sampler::draw(std::span<const float> logits, float top, double uniform) {
  const auto is_likelier = [&](std::int32_t a, std::int32_t b) {
    return at(logits, a) != at(logits, b) ? at(logits, a) > at(logits, b) : a < b;
  };
  const auto weight = [&](std::int32_t token) {
    return std::exp((static_cast<double>(at(logits, token)) - top) / sampling_.temperature);
  };
  tokens_.resize(logits.size());
  std::iota(tokens_.begin(), tokens_.end(), 0);
  if (sampling_.top_k > 0 && sampling_.top_k < std::ssize(tokens_)) {
    const auto end = tokens_.begin() + sampling_.top_k;
    std::nth_element(tokens_.begin(), end, tokens_.end(), is_likelier);
    tokens_.erase(end, tokens_.end());
    std::ranges::sort(tokens_);  // nothing depends on how the library sets them apart
  }
  if (sampling_.top_p < 1) {
    double total = 0, kept = 0;
    for (const std::int32_t token : tokens_) total += weight(token);
    const auto is_less_likely = [&](std::int32_t a, std::int32_t b) { return is_likelier(b, a); };
    std::ranges::make_heap(tokens_, is_less_likely);
    auto heap = tokens_.end();  // the kept are from here on
    while (heap != tokens_.begin() && kept < sampling_.top_p * total) {
      std::ranges::pop_heap(tokens_.begin(), heap, is_less_likely);
      kept += weight(*--heap);
    }
    tokens_.erase(tokens_.begin(), heap);
  }
  sums_.clear();
  double sum = 0;
  for (const std::int32_t token : tokens_) sums_.push_back(sum += weight(token));
  const auto drawn = std::ranges::upper_bound(sums_, uniform * sum);  // never the end: uniform < 1
  return tokens_[static_cast<std::size_t>(drawn - sums_.begin())];
}

}  // namespace tessera::tools
