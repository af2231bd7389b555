// Which blocks of memory there are when a category holds most: behind a plan's peaks, the tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/memory_listener.h"

namespace tessera::tools {

/// For one thread: a plan has no other.
class PeakBlocks final : public engine::MemoryListener {
 public:
  /// Blocks of one name and size.
  struct Kind {
    std::string what;  ///< "4 B x 8 x 1,024 x 768, linear", or "4,096 B, slot" of what is no tensor
    std::int64_t nbytes;  ///< of one
    std::int64_t count;
  };

  /// Peaks start again from what is there now.
  void begin();
  /// What is there when `category` holds most since begin(), the first time; by `what`.
  std::vector<Kind> most(engine::Category category) const;

  void on_allocate(const std::byte* data, std::int64_t nbytes, engine::Category category,
                   std::string_view name) override;
  void on_tensor(const std::byte* data, const engine::Shape& shape, engine::DType dtype) override;
  void on_free(const std::byte* data) override;

 private:
  void make_room(std::size_t num_blocks);

  struct Block {
    std::string name, size;
    std::int64_t nbytes;
    engine::Category category;
  };
  struct Use {
    std::int64_t nbytes = 0, most_nbytes = 0;
    std::size_t num_changes = 0;  // when it was most
  };

  std::vector<Block> blocks_;                                 // all that ever were
  std::unordered_map<const std::byte*, std::size_t> in_use_;  // of blocks_
  std::vector<std::size_t> at_begin_;                         // of blocks_
  std::vector<std::size_t> changes_;                          // since: taken, or given back
  std::array<Use, engine::kNumCategories> uses_{};
};

}  // namespace tessera::tools
