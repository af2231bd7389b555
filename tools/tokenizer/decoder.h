// How tokens become text again.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/tokenizer/json_node.h"
#include "tools/tokenizer/text/byte_alphabet.h"
#include "tools/tokenizer/text/regex.h"

namespace tessera::tools {

/// The decoder of a tokenizer.json: none, which puts a space between tokens, or steps that follow
/// each other. Can be used by any number of threads.
class Decoder {
 public:
  Decoder() = default;
  /// Of `node`: null, or one of ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, or a
  /// Sequence of those, with at most kMaxTokenizerSteps. Throws IoError naming file and key for all
  /// others.
  explicit Decoder(const JsonNode& node);
  /// GPT-2's: ByteLevel alone.
  static Decoder byte_level();

  /// The text of tokens. Bytes that are not UTF-8 become U+FFFD, as valid_utf8() says.
  /// Throws IoError as replaced().
  std::string text_of(std::vector<std::string> tokens) const;

 private:
  using Tokens = std::vector<std::string>;
  struct ByteLevel {
    ByteAlphabet alphabet;
  };
  struct Replace {
    Regex regex;
    std::string text;
  };
  struct ByteFallback {};
  struct Fuse {};
  struct Strip {
    char32_t character;
    std::int64_t start, stop;  // how many at most
  };
  struct Metaspace {
    char32_t replacement;
    bool prepends;
  };
  using Step = std::variant<ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace>;

  void read(const JsonNode& node);
  static Tokens run(const ByteLevel& step, Tokens tokens);
  static Tokens run(const Replace& step, Tokens tokens);
  static Tokens run(const ByteFallback& step, const Tokens& tokens);
  static Tokens run(const Fuse& step, const Tokens& tokens);
  static Tokens run(const Strip& step, Tokens tokens);
  static Tokens run(const Metaspace& step, Tokens tokens);

  bool is_none_ = true;
  std::vector<Step> steps_;
};

}  // namespace tessera::tools
