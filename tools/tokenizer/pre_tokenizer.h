// How a text is cut into the words that are encoded one by one.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/tokenizer/json_node.h"
#include "tools/tokenizer/text/regex.h"

namespace tessera::tools {

/// What becomes of the matches of an expression that a text is cut at.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

/// The pre-tokenizer of a tokenizer.json: none, or steps, each of which cuts the words of the one
/// before. Can be used by any number of threads, each with a scratch of its own.
class PreTokenizer {
 public:
  using Sink = std::function<void(std::string_view word)>;

  PreTokenizer() = default;
  /// Of `node`: null, or one of ByteLevel, Split, Digits, Metaspace, or a Sequence of those in
  /// which ByteLevel is last, with at most kMaxTokenizerSteps. Throws IoError naming file and key
  /// for all others.
  explicit PreTokenizer(const JsonNode& node);
  /// GPT-2's: ByteLevel alone. `add_prefix_space`: a text that begins with no space gets one.
  static PreTokenizer byte_level(bool add_prefix_space);

  /// Whether words are bytes that the vocabulary has in the characters of ByteAlphabet.
  bool is_byte_level() const { return is_byte_level_; }

  /// Calls `sink` with the words of `text`, which must be UTF-8, in order; none is empty, and none
  /// is valid after the call. `is_start`: whether the text is at the start of its document.
  void visit(std::string_view text, bool is_start, RegexScratch& scratch, const Sink& sink) const {
    run(0, text, is_start, scratch, sink);
  }

 private:
  struct ByteLevel {
    bool add_prefix_space = true;
    std::vector<Regex> regex;  // none, or GPT-2's
  };
  struct Split {
    Regex regex;
    SplitBehavior behavior;
    bool invert;
  };
  struct Digits {
    bool individual;
  };
  struct Metaspace {
    std::string replacement;
    enum class Prepend { kAlways, kFirst, kNever } prepend;
    std::vector<Regex> regex;  // of the replacement: none, where words are not split at it
  };
  using Step = std::variant<ByteLevel, Split, Digits, Metaspace>;

  void read(const JsonNode& node);
  void read_metaspace(const JsonNode& node);
  void run(std::size_t step, std::string_view text, bool is_start, RegexScratch& scratch,
           const Sink& sink) const;
  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace tessera::tools
