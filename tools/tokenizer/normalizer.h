// What is done to a text before it is cut into words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/tokenizer/json_node.h"
#include "tools/tokenizer/text/normal_form.h"
#include "tools/tokenizer/text/regex.h"

namespace tessera::tools {

/// The normalizer of a tokenizer.json: none, or steps that follow each other. Can be used by any
/// number of threads, each with a scratch of its own.
class Normalizer {
 public:
  Normalizer() = default;
  /// Of `node`: null, or one of NFC, NFD, NFKC, NFKD, Prepend, Replace, or a Sequence of
  /// those, with at most kMaxTokenizerSteps. Throws IoError naming file and key for all others.
  explicit Normalizer(const JsonNode& node);

  bool is_none() const { return steps_.empty(); }
  /// `text`, which must be UTF-8, normalized. `buffer` holds it where that is another text.
  std::string_view normalized(std::string_view text, RegexScratch& scratch,
                              std::string& buffer) const;

 private:
  struct Prepend {
    std::string text;
  };
  struct Replace {
    Regex regex;
    std::string text;
  };
  using Step = std::variant<NormalForm, Prepend, Replace>;

  void read(const JsonNode& node);
  static std::string run(const Step& step, std::string_view text, RegexScratch& scratch);

  std::vector<Step> steps_;
};

/// The expression of a key "pattern": {"String": ...} or {"Regex": ...}. Throws IoError naming file
/// and key for others, and for an empty one.
Regex read_pattern(const JsonNode& node);

/// The most bytes of a text that is normalized or decoded: ICU counts them in 32 bits.
inline constexpr std::size_t kMaxTextNbytes = std::numeric_limits<std::int32_t>::max();

/// `text` with `with` for every match. Throws IoError, naming the place of `regex`, as soon as that
/// would have more than `max_nbytes`.
std::string replaced(std::string_view text, const Regex& regex, std::string_view with,
                     RegexScratch& scratch, std::size_t max_nbytes = kMaxTextNbytes);

}  // namespace tessera::tools
