#include "tools/planning/peak_blocks.h"

#include <fmt/format.h>

#include <map>
#include <unordered_set>
#include <utility>

#include "engine/io/text.h"
#include "engine/tensor.h"

namespace tessera::tools {

using engine::Category;
using engine::with_commas;

// So that memory is given back without asking for more: nobody could be told that there is none.
void PeakBlocks::make_room(std::size_t num_blocks) {
  const std::size_t needed = changes_.size() + 2 * num_blocks;
  if (needed > changes_.capacity()) changes_.reserve(2 * needed);
}

void PeakBlocks::begin() {
  at_begin_.clear();
  for (const auto& [data, block] : in_use_) at_begin_.push_back(block);
  changes_.clear();
  make_room(in_use_.size());
  for (Use& use : uses_) use = {.nbytes = use.nbytes, .most_nbytes = use.nbytes};
}

void PeakBlocks::on_allocate(const std::byte* data, std::int64_t nbytes, Category category,
                             std::string_view name) {
  make_room(in_use_.size() + 1);
  in_use_[data] = blocks_.size();
  changes_.push_back(blocks_.size());
  blocks_.push_back(
      {std::string(name), fmt::format("{} B", with_commas(nbytes)), nbytes, category});
  Use& use = uses_[static_cast<std::size_t>(category)];
  use.nbytes += nbytes;
  if (use.nbytes <= use.most_nbytes) return;
  use.most_nbytes = use.nbytes;
  use.num_changes = changes_.size();
}

void PeakBlocks::on_tensor(const std::byte* data, const engine::Shape& shape, engine::DType dtype) {
  std::string& size = blocks_[in_use_.at(data)].size;
  size = fmt::format("{} B", size_of(dtype));
  for (const std::int64_t dim : shape.dims()) size += fmt::format(" x {}", with_commas(dim));
}

void PeakBlocks::on_free(const std::byte* data) {
  const auto it = in_use_.find(data);
  const Block& block = blocks_[it->second];
  uses_[static_cast<std::size_t>(block.category)].nbytes -= block.nbytes;
  changes_.push_back(it->second);
  in_use_.erase(it);
}

std::vector<PeakBlocks::Kind> PeakBlocks::most(Category category) const {
  std::unordered_set<std::size_t> there(at_begin_.begin(), at_begin_.end());
  const std::size_t num_changes = uses_[static_cast<std::size_t>(category)].num_changes;
  for (std::size_t i = 0; i < num_changes; ++i) {
    if (!there.insert(changes_[i]).second) there.erase(changes_[i]);  // the second change of it
  }
  std::map<std::string, Kind> kinds;
  for (const std::size_t i : there) {
    const Block& block = blocks_[i];
    if (block.category != category || block.nbytes == 0) continue;
    const std::string what = fmt::format("{}, {}", block.size, block.name);
    ++kinds.try_emplace(what, Kind{what, block.nbytes, 0}).first->second.count;
  }
  std::vector<Kind> result;
  for (auto& [what, kind] : kinds) result.push_back(std::move(kind));
  return result;
}

}  // namespace tessera::tools
