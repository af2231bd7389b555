// Text to token ids and back, as the tokenizer.json of a model says.
//
//   const Tokenizer tokenizer = Tokenizer::read("model");    // the folder, or the file
//   const std::vector<std::int32_t> ids = tokenizer.encode("In the beginning");
//   const std::string text = tokenizer.decode(ids);
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tools/tokenizer/bpe.h"
#include "tools/tokenizer/text/regex.h"
#include "tools/tokenizer/tokenizer_file.h"

namespace tessera::tools {

/// Never changes: any number of threads can use it.
class Tokenizer {
 public:
  /// Reads a tokenizer.json, or that of a folder, or the vocab.json and merges.txt of one that has
  /// none; and tokenizer_config.json beside it, for bos() and eos(). Throws IoError naming file and
  /// key for what is missing, damaged or not known here.
  static Tokenizer read(const std::string& path);
  explicit Tokenizer(TokenizerParts parts);

  /// The ids of `text`, of less than 2 GiB; bytes that are not UTF-8 count as U+FFFD, as
  /// valid_utf8() says. `add_special_tokens`: with the tokens that the file puts around a text.
  /// Throws IoError when an expression of the file takes too many steps on the text, or makes it
  /// longer than 2 GiB. An Encoder is faster for several texts.
  std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens = true) const;
  /// The tokens that encode() puts before and after a text.
  std::span<const std::int32_t> before() const { return parts_.post_processor.before(); }
  std::span<const std::int32_t> after() const { return parts_.post_processor.after(); }
  /// The text of `ids`. `skip_special`: without special tokens. Throws InvalidArgument for an id
  /// that is not in [0, vocab_size()), and IoError for a text of more than 2 GiB.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = true) const;

  std::int64_t vocab_size() const { return std::ssize(parts_.tokens); }
  /// The id of a token by its text in the file, such as "<|endoftext|>".
  std::optional<std::int32_t> id_of(std::string_view token) const;
  std::optional<std::int32_t> bos() const { return parts_.bos; }  ///< the first of a text
  std::optional<std::int32_t> eos() const { return parts_.eos; }  ///< and the last

 private:
  friend class Encoder;
  friend class StreamDecoder;

  TokenizerParts parts_;
  // By id. As in the tokenizers of Hugging Face, added tokens that normalization changes are shown
  // as they are after it, and never left out.
  std::vector<bool> is_special_;
  std::unordered_map<std::int32_t, std::string> normalized_;
};

/// Encodes one text after another, in one thread, and remembers words. Refers to a tokenizer that
/// outlives it.
class Encoder {
 public:
  explicit Encoder(const Tokenizer& tokenizer) : parts_(tokenizer.parts_) {}

  /// Appends the ids of `text` to `ids`; see Tokenizer::encode().
  void encode(std::string_view text, bool add_special_tokens, std::vector<std::int32_t>& ids);

 private:
  void encode_words(std::string_view text, bool is_start, std::vector<std::int32_t>& ids);

  const TokenizerParts& parts_;
  BpeScratch bpe_;
  RegexScratch regex_;
  std::string valid_, normalized_;
};

/// Decodes ids as they come, and holds a text back until its last character is whole. Where
/// decode() of all ids has no U+FFFD the parts add up to it; not with a decoder that has a Replace,
/// or a Strip of more than one character, after a Fuse, as no known model does. Refers to a
/// tokenizer that outlives it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}

  /// What `id` adds to the text: nothing while a character is not whole, but never more than 16 ids
  /// are held back. Valid UTF-8. Throws as decode().
  std::string next(std::int32_t id);
  /// What was held back, with U+FFFD for what never became whole. Ends the text.
  std::string finish();

 private:
  // What `text`, of ids_, has after known_.
  std::string added_by(const std::string& text) const;

  const Tokenizer& tokenizer_;
  bool skip_special_;
  // The ids of the part that was returned last, and those after it. What a token is can depend on
  // the ones before it, and a run of byte tokens is text as a whole or not at all: a part ends
  // where all bytes before it are whole.
  std::vector<std::int32_t> ids_;
  std::size_t num_known_ = 0;  // ids of that part
  std::string known_;          // what they alone are, as far as it was returned
};

}  // namespace tessera::tools
