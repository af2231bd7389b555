// Several runs at the same time, for tests whose runs mostly wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <type_traits>
#include <vector>

namespace tessera::testing {

/// fn(item) for each of `items`; eight calls run at the same time.
template <typename Item, typename Fn>
void for_each_concurrently(const std::vector<Item>& items, const Fn& fn) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < items.size(); i = next++) fn(items[i]);
  };
  std::vector<std::future<void>> workers(std::min<std::size_t>(8, items.size()));
  for (auto& worker : workers) worker = std::async(std::launch::async, work);
  for (auto& worker : workers) worker.get();
}

/// What fn(item) returns for each of `items`, in their order.
template <typename Item, typename Fn>
auto concurrently(const std::vector<Item>& items, const Fn& fn) {
  std::vector<std::invoke_result_t<Fn, const Item&>> results(items.size());
  for_each_concurrently(items, [&](const Item& item) {
    results[static_cast<std::size_t>(&item - items.data())] = fn(item);
  });
  return results;
}

}  // namespace tessera::testing
