// What a refused memory_budget would have to be.
#pragma once

#include <algorithm>
#include <string>

namespace tessera::testing {

/// In bytes, as `refusal` says it of the configuration that it names; empty if it does not.
inline std::string smallest_budget(const std::string& refusal) {
  const std::string words = "the smallest budget that fits is ";
  const std::size_t at = refusal.find(words);
  if (at == std::string::npos) return "";
  std::string bytes = refusal.substr(at + words.size());
  bytes.resize(std::min(bytes.find(' '), bytes.size()));
  std::erase(bytes, ',');
  return bytes;
}

}  // namespace tessera::testing
