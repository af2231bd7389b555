// Tokens that are found in a text as they are, before it is cut into words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/tokenizer/normalizer.h"

namespace tessera::tools {

struct AddedToken {
  std::int32_t id = 0;
  std::string content{};
  bool single_word = false;  ///< not next to a letter, a digit or the like
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< and after it
  bool normalized = false;   ///< is looked for in the text when that is normalized
  bool special = false;      ///< is left out of what is decoded
  std::string text{};        ///< what is looked for: set by AddedTokens
};

/// Finds added tokens: at each place the longest, from left to right.
class AddedTokens {
 public:
  /// A token, or a text between two.
  using Visit = std::function<void(const AddedToken* token, std::string_view text)>;

  AddedTokens() = default;
  AddedTokens(AddedTokens&&) = default;
  AddedTokens& operator=(AddedTokens&&) = default;
  AddedTokens(const AddedTokens&) = delete;
  AddedTokens& operator=(const AddedTokens&) = delete;
  /// Contents must not be empty, nor become so when normalized, and must differ. Throws IoError,
  /// naming `place` and the token, otherwise.
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer,
              const std::string& place);

  const std::vector<AddedToken>& all() const { return tokens_; }

  /// Cuts `text`, which must be UTF-8, at the tokens that are looked for before it is normalized.
  void visit(std::string_view text, const Visit& visit) const { before_.visit(text, visit); }
  /// Cuts `text`, which is normalized, at the other ones.
  void visit_normalized(std::string_view text, const Visit& visit) const {
    after_.visit(text, visit);
  }

 private:
  // A tree of bytes, whose nodes hold the token that ends there.
  class Finder {
   public:
    Finder() { begins_.fill(false); }
    // False when another token has this text.
    bool add(const AddedToken& token);
    void visit(std::string_view text, const Visit& visit) const;

   private:
    struct Node {
      const AddedToken* token = nullptr;
      std::vector<std::pair<char, std::uint32_t>> next{};  // by byte
    };
    const Node* child(const Node& node, char byte) const;
    // The longest token that begins at `at`; null: none. `end` becomes where it ends.
    const AddedToken* find(std::string_view text, std::size_t at, std::size_t& end) const;

    std::array<bool, 256> begins_{};  // whether any token begins with that byte
    std::vector<Node> nodes_{1};
  };

  std::vector<AddedToken> tokens_;
  Finder before_, after_;
};

}  // namespace tessera::tools
