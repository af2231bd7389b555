#include "tools/launch/slurm_lists.h"

#include <charconv>
#include <cstddef>
#include <system_error>

namespace tessera::tools {
namespace {

constexpr int kMax = 1 << 16;

// Takes `word` off the front of `text`, if it begins so.
bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

// Takes a number in [1, kMax] off the front; 0 if there is none.
int take_count(std::string_view& text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || count < 1 || count > kMax) return 0;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return count;
}

}  // namespace

std::vector<int> slurm_tasks(std::string_view list) {
  std::vector<int> tasks;
  do {
    const int count = take_count(list);
    int hosts = 1;
    if (take(list, "(x")) {
      hosts = take_count(list);
      if (!take(list, ")")) return {};
    }
    if (count == 0 || hosts == 0 || tasks.size() + static_cast<std::size_t>(hosts) > kMax) {
      return {};
    }
    tasks.insert(tasks.end(), static_cast<std::size_t>(hosts), count);
  } while (take(list, ","));
  if (!list.empty()) return {};
  return tasks;
}

std::string slurm_first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (take(list, "[")) {
      const std::size_t end = list.find(']');
      if (end == std::string_view::npos) return "";
      const std::string_view first = list.substr(0, list.find_first_of("-,]"));
      if (first.empty()) return "";
      host += first;
      list.remove_prefix(end + 1);
    } else {
      host += list.front();
      list.remove_prefix(1);
    }
  }
  return host;
}

}  // namespace tessera::tools
