#include "tools/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {
namespace {

// Up to here the pairs of a word are searched for the first one; from here on they are a heap.
constexpr std::size_t kFew = 48;

/// With the bytes that tokens stand for as their text; without tokens that stand for none.
TokenIds of_bytes(const TokenIds& vocab) {
  const ByteAlphabet alphabet;
  TokenIds tokens;
  tokens.reserve(vocab.size());
  for (const auto& [text, id] : vocab) {
    if (auto bytes = alphabet.bytes_of(text)) tokens.emplace(std::move(*bytes), id);
  }
  return tokens;
}

}  // namespace

Bpe::Bpe(TokenIds vocab, std::span<const Merge> merges, const BpeOptions& options)
    : vocab_(std::move(vocab)), merges_(merges), options_(options) {
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto found = vocab_.find(fmt::format("<0x{:02X}>", byte));
    byte_tokens_[byte] = found == vocab_.end() ? -1 : found->second;
  }
  const ByteAlphabet alphabet;
  for (std::size_t byte = 0; byte < (options.is_byte_level ? 256u : 128u); ++byte) {
    of_byte_[byte] = start_of(to_utf8(options.is_byte_level
                                          ? alphabet.character_of(static_cast<unsigned char>(byte))
                                          : static_cast<char32_t>(byte)));
  }
  if (options.is_byte_level) vocab_ = of_bytes(vocab_);
}

Bpe::Start Bpe::start_of(const std::string& character) const {
  if (const auto found = vocab_.find(character); found != vocab_.end()) return {found->second};
  Start start;
  if (!options_.byte_fallback) return start;
  for (const char byte : character) {
    const std::int32_t id = byte_tokens_[static_cast<unsigned char>(byte)];
    if (id < 0) return {};
    start.bytes.push_back(id);
  }
  return start;
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const {
  if (word.empty()) return;
  const bool is_short = word.size() <= WordCache::kMaxWordNbytes;
  const std::uint64_t hash = is_short ? WordCache::hash_of(word) : 0;
  if (is_short) {
    if (const auto known = scratch.cache.find(word, hash)) {
      ids.insert(ids.end(), known->begin(), known->end());
      return;
    }
  }
  encode_new(word, scratch);
  if (is_short) scratch.cache.add(word, hash, scratch.ids);
  ids.insert(ids.end(), scratch.ids.begin(), scratch.ids.end());
}

void Bpe::encode_new(std::string_view word, BpeScratch& scratch) const {
  scratch.ids.clear();
  if (options_.ignore_merges) {
    if (const auto found = vocab_.find(word); found != vocab_.end()) {
      scratch.ids.push_back(found->second);
      return;
    }
  }
  start(word, scratch.ids);
  if (scratch.ids.size() <= kFew) {
    merge_few(scratch);
  } else {
    merge_many(scratch);
  }
}

void Bpe::start(std::string_view word, std::vector<std::int32_t>& ids) const {
  bool is_unknown = false;  // the unknown token of what was before is yet to be added
  const auto add = [&](const Start& start) {
    if (start.id >= 0) {
      if (std::exchange(is_unknown, false)) ids.push_back(*options_.unknown);
      ids.push_back(start.id);
    } else if (!start.bytes.empty()) {
      ids.insert(ids.end(), start.bytes.begin(), start.bytes.end());
    } else if (options_.unknown) {
      if (is_unknown && !options_.fuse_unknown) ids.push_back(*options_.unknown);
      is_unknown = true;
    }
  };
  for (std::size_t at = 0; at < word.size();) {
    const auto byte = static_cast<unsigned char>(word[at]);
    if (options_.is_byte_level || byte < 128) {
      add(of_byte_[byte]);
      ++at;
    } else {
      const std::size_t begin = at;
      next_character(word, at);
      add(start_of(std::string(word.substr(begin, at - begin))));
    }
  }
  if (is_unknown) ids.push_back(*options_.unknown);
}

void Bpe::merge_few(BpeScratch& scratch) const {
  std::vector<std::int32_t>& ids = scratch.ids;
  std::vector<std::uint32_t>& ranks = scratch.ranks;  // of each token and the next one
  ranks.clear();
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
    ranks.push_back(merges_.rank(ids[i], ids[i + 1]));
  }
  while (!ranks.empty()) {
    const auto first = std::ranges::min_element(ranks);
    if (*first == MergeTable::kNone) return;
    const auto at = static_cast<std::size_t>(first - ranks.begin());
    ids[at] = merges_.result(*first);
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    ranks.erase(first);
    if (at > 0) ranks[at - 1] = merges_.rank(ids[at - 1], ids[at]);
    if (at < ranks.size()) ranks[at] = merges_.rank(ids[at], ids[at + 1]);
  }
}

void Bpe::merge_many(BpeScratch& scratch) const {
  constexpr std::int32_t kGone = -1;
  std::vector<std::int32_t>& ids = scratch.ids;
  const auto n = static_cast<std::uint32_t>(ids.size());
  std::vector<std::uint32_t>&ranks = scratch.ranks, &next = scratch.next;
  std::vector<std::uint32_t>& previous = scratch.previous;
  std::vector<std::uint64_t>& heap = scratch.heap;
  ranks.assign(n, MergeTable::kNone);
  next.resize(n);
  previous.resize(n);
  heap.clear();
  // The smallest is on top: the first merge, and of the same one the leftmost. What was pushed for
  // a pair that has changed since stays until it is on top.
  const std::greater<> later;
  const auto set_rank = [&](std::uint32_t at) {
    ranks[at] = next[at] < n ? merges_.rank(ids[at], ids[next[at]]) : MergeTable::kNone;
    if (ranks[at] == MergeTable::kNone) return false;
    heap.push_back(std::uint64_t{ranks[at]} << 32 | at);
    return true;
  };
  for (std::uint32_t i = 0; i < n; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;  // of the first one: more than n
  }
  for (std::uint32_t i = 0; i < n; ++i) set_rank(i);
  std::ranges::make_heap(heap, later);
  while (!heap.empty()) {
    std::ranges::pop_heap(heap, later);
    const auto at = static_cast<std::uint32_t>(heap.back());
    const auto rank = static_cast<std::uint32_t>(heap.back() >> 32);
    heap.pop_back();
    if (ranks[at] != rank) continue;
    const std::uint32_t right = next[at];
    ids[at] = merges_.result(rank);
    ids[right] = kGone;
    ranks[right] = MergeTable::kNone;
    next[at] = next[right];
    if (next[at] < n) previous[next[at]] = at;
    for (const std::uint32_t changed : {previous[at], at}) {
      if (changed < n && set_rank(changed)) std::ranges::push_heap(heap, later);
    }
  }
  std::erase(ids, kGone);
}

}  // namespace tessera::tools
