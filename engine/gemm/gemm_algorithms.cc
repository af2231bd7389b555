#include "engine/gemm/gemm_algorithms.h"

#include <algorithm>
#include <charconv>

#include "engine/error.h"

namespace tessera::engine {

namespace {

constexpr std::string_view kHeader = "tessera gemm algorithms 1";
constexpr std::size_t kWordLength = 8;

std::uint32_t parse_word(std::string_view word, std::string_view file, std::size_t line) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(word.begin(), word.end(), value, 16);
  require<IoError>(
      word.size() == kWordLength && error == std::errc() && end == word.end(),
      "[gemm_algorithms] expected words of {} hexadecimal digits, got '{}' ({}, line {})",
      kWordLength, word, file, line);
  return value;
}

}  // namespace

void GemmAlgorithms::load(std::string_view text, std::string_view file) {
  const std::lock_guard lock(mutex_);
  std::map<std::string, Algorithm> entries = entries_;
  std::size_t line = 0;
  while (!text.empty() || line == 0) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (++line == 1) {
      require<IoError>(row == kHeader, "[gemm_algorithms] expected '{}', got '{}' ({}, line 1)",
                       kHeader, row.substr(0, 80), file);
      continue;
    }
    const std::size_t tab = row.find('\t');
    Algorithm algorithm;
    const bool fits = tab != std::string_view::npos && tab > 0 &&
                      row.size() - tab == algorithm.size() * (kWordLength + 1);
    require<IoError>(fits,
                     "[gemm_algorithms] expected a key, a tab and {} words, got '{}' ({}, line {})",
                     algorithm.size(), row.substr(0, 80), file, line);
    for (std::size_t i = 0; i < algorithm.size(); ++i) {
      const std::size_t at = tab + i * (kWordLength + 1);
      require<IoError>(i == 0 || row[at] == ' ',
                       "[gemm_algorithms] expected spaces between words, got '{}' ({}, line {})",
                       row[at], file, line);
      algorithm[i] = parse_word(row.substr(at + 1, kWordLength), file, line);
    }
    const auto [entry, added] = entries.emplace(row.substr(0, tab), algorithm);
    require<IoError>(added || entry->second == algorithm,
                     "[gemm_algorithms] expected one algorithm a key, got two for '{}' ({}, line "
                     "{})",
                     row.substr(0, 80), file, line);
  }
  entries_ = std::move(entries);
}

std::string GemmAlgorithms::text() const {
  const std::lock_guard lock(mutex_);
  std::string text = fmt::format("{}\n", kHeader);
  for (const auto& [key, algorithm] : entries_) {
    text += key;
    for (std::size_t i = 0; i < algorithm.size(); ++i)
      text += fmt::format("{}{:08x}", i == 0 ? '\t' : ' ', algorithm[i]);
    text += '\n';
  }
  return text;
}

std::optional<GemmAlgorithms::Algorithm> GemmAlgorithms::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(key);
  return entry == entries_.end() ? std::nullopt : std::optional(entry->second);
}

GemmAlgorithms::Algorithm GemmAlgorithms::insert(const std::string& key,
                                                 const Algorithm& algorithm) {
  const std::lock_guard lock(mutex_);
  return entries_.emplace(key, algorithm).first->second;
}

std::int64_t GemmAlgorithms::size() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(entries_);
}

}  // namespace tessera::engine
