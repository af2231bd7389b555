// Items of several sizes into bins of one: documents into sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::tools {

/// The bin of each item, in their order: the first that has room for it ("first-fit" of Johnson,
/// Near-optimal bin packing algorithms, 1973). Bins are counted from 0, none is empty, and all have
/// room for `capacity`. Takes O(n log n) steps and 24 n bytes. Throws InvalidArgument for a size
/// that is not in [1, capacity].
std::vector<std::int64_t> first_fit(std::span<const std::int32_t> sizes, std::int64_t capacity);

}  // namespace tessera::tools
