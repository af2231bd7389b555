// What fuzz targets have in common. A target is one way in for bytes that nobody vouches for. It
// defines kTarget and consume(); libFuzzer calls it through libfuzzer.cc, and corpus_test.cc runs
// it over corpus/NAME, where valid* must be accepted, refused* must not, and found* once was a
// finding.
#pragma once

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::fuzz {

/// The folder of the corpus.
extern const char* const kTarget;

/// Reads `input`. Throws engine::Error if it is refused; anything else that happens is a finding.
void consume(std::string_view input);

/// Whether consume() accepts `input`. Throws std::logic_error for a refusal that a person could not
/// read: without [where], or longer than a screen.
bool is_accepted(std::string_view input);

/// A promise that `input` broke.
inline void promise(bool kept, const char* what) {
  if (!kept) throw std::logic_error(what);
}

/// What stands between lines of "====": the files of an input of several.
inline std::vector<std::string_view> parts_of(std::string_view input) {
  constexpr std::string_view kBetween = "\n====\n";
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = input.find(kBetween);
    parts.push_back(input.substr(0, end));
    if (end == std::string_view::npos) return parts;
    input.remove_prefix(end + kBetween.size());
  }
}

/// The digits that `text` starts with, as a number; 0 if there are none.
inline std::int64_t number_in(std::string_view text) {
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace tessera::fuzz
