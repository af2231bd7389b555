#include "tools/data/data_digest.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "engine/io/xxh3.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kNumParts = 4096;
constexpr std::int64_t kChunk = 1 << 19;  // tokens read at a time

void add(engine::Xxh3& sum, const ImageSet& set) {
  const std::int64_t sizes[] = {set.num_images, set.height, set.width};
  sum.update(std::as_bytes(std::span(sizes)));
  sum.update(std::as_bytes(std::span(set.pixels)));
  sum.update(std::as_bytes(std::span(set.labels)));
}

}  // namespace

std::string digest_of(const TokenFile& tokens, std::int64_t most) {
  const std::int64_t count = tokens.num_tokens();
  engine::Xxh3 sum;
  std::vector<std::int32_t> ids, learned;
  const auto add = [&](std::int64_t first, std::int64_t numel) {
    for (const std::int64_t end = first + numel; first < end; first += std::ssize(ids)) {
      ids.resize(static_cast<std::size_t>(std::min(kChunk, end - first)));
      constexpr std::int64_t kAnyVocab = std::numeric_limits<std::int64_t>::max();
      learned.resize(ids.size());
      tokens.read(first, kAnyVocab, ids, learned);
      sum.update(std::as_bytes(std::span(ids)));
      if (tokens.keeps_documents()) sum.update(std::as_bytes(std::span(learned)));
    }
  };
  sum.update(std::as_bytes(std::span(tokens.document_ends())));
  const std::int64_t part = most / kNumParts;
  if (count <= most || part == 0) {
    add(0, count);
  } else {
    for (std::int64_t i = 0; i < kNumParts; ++i) {
      // As doubles, which need not be exact: a product of both may be beyond 64 bits.
      const double at = static_cast<double>(count - part) * static_cast<double>(i) /
                        static_cast<double>(kNumParts - 1);
      add(static_cast<std::int64_t>(at), part);
    }
  }
  return fmt::format("{} tokens {:016x}", count, sum.value());
}

std::string digest_of(const FashionMnist& data) {
  engine::Xxh3 sum;
  add(sum, data.train);
  add(sum, data.test);
  return fmt::format("{} images {:016x}", data.train.num_images + data.test.num_images,
                     sum.value());
}

}  // namespace tessera::tools
