// Which words of a block's dynamic shared memory the async proxy may read. Private to the emulated
// device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::cuda_emulation {

/// Remembers who wrote a word last, when each thread has fenced since, and when it was last read;
/// time is counted in barriers of the whole block. What is written by a plain store is not known,
/// and so not readable.
class AsyncProxy {
 public:
  /// Of a new block, whose memory nobody has written.
  void start(const void* shared, std::size_t nbytes, unsigned num_threads) {
    shared_ = static_cast<const std::byte*>(shared);
    num_barriers_ = 1;
    words_.assign(nbytes / kWord, {});
    fences_.resize(num_threads);
    for (auto& fences : fences_) fences.clear();
  }
  void pass_barrier() { ++num_barriers_; }
  void fence(unsigned thread) { fences_[thread].push_back(num_barriers_); }

  /// False if products have read what is written, and no barrier came between.
  bool note_write(const void* address, std::size_t nbytes, unsigned thread) {
    const std::size_t first = offset_of(address) / kWord, count = nbytes / kWord;
    if (first >= words_.size() || count > words_.size() - first) return true;  // static memory
    bool is_ordered = true;
    for (std::size_t i = first; i < first + count; ++i) {
      is_ordered &= words_[i].read_at != num_barriers_;
      words_[i].writer = thread;
      words_[i].num_fences = static_cast<std::uint32_t>(fences_[thread].size());
    }
    return is_ordered;
  }

  static constexpr std::uint32_t kWindow = 1024 + 32;  ///< shared address of the first byte
  std::uint32_t window_address(const void* address) const {
    return static_cast<std::uint32_t>(offset_of(address)) + kWindow;
  }

  enum class Sight { kOutside, kUnknown, kUnfenced, kUnordered, kVisible };
  Sight sight(std::uint32_t window_address, std::size_t nbytes) const {
    const std::size_t first = (std::size_t{window_address} - kWindow) / kWord;
    const std::size_t count = nbytes / kWord;
    if (window_address < kWindow || first + count > words_.size()) return Sight::kOutside;
    for (std::size_t i = first; i < first + count; ++i) {
      const Word& word = words_[i];
      if (word.writer == kNobody) return Sight::kUnknown;
      const std::vector<std::uint32_t>& fences = fences_[word.writer];
      if (fences.size() == word.num_fences) return Sight::kUnfenced;
      if (fences[word.num_fences] == num_barriers_) return Sight::kUnordered;
    }
    return Sight::kVisible;
  }
  /// A product that has read this is over.
  void note_read(std::uint32_t window_address, std::size_t nbytes) {
    const std::size_t first = (window_address - kWindow) / kWord;
    for (std::size_t i = first; i < first + nbytes / kWord; ++i) words_[i].read_at = num_barriers_;
  }
  const std::byte* at(std::uint32_t window_address) const {
    return shared_ + (window_address - kWindow);
  }

 private:
  static constexpr std::size_t kWord = 4;
  static constexpr unsigned kNobody = ~0u;
  struct Word {
    unsigned writer = kNobody;
    std::uint32_t num_fences = 0;  // of the writer, when it wrote
    std::uint32_t read_at = 0;     // barriers before
  };

  std::size_t offset_of(const void* address) const {
    return static_cast<std::size_t>(static_cast<const std::byte*>(address) - shared_);
  }

  const std::byte* shared_ = nullptr;
  std::uint32_t num_barriers_ = 1;  // and one
  std::vector<Word> words_;
  std::vector<std::vector<std::uint32_t>> fences_;  // by thread: barriers before each
};

}  // namespace tessera::cuda_emulation
