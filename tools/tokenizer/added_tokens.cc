#include "tools/tokenizer/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {
namespace {

bool is_space(char32_t character) { return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0; }

// What Unicode's recommendation for regular expressions (UTS 18) calls a character of a word.
bool is_of_word(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  constexpr auto kMask = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) != 0 || (U_GET_GC_MASK(c) & kMask) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) != 0;
}

bool ends_with_word(std::string_view text) {
  if (text.empty()) return false;
  std::size_t at = previous_character(text, text.size());
  return is_of_word(next_character(text, at));
}
bool starts_with_word(std::string_view text) {
  std::size_t at = 0;
  return !text.empty() && is_of_word(next_character(text, at));
}

// Where the white space at the end of `text` begins.
std::size_t end_without_space(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0) {
    const std::size_t begin = previous_character(text, end);
    std::size_t at = begin;
    if (!is_space(next_character(text, at))) break;
    end = begin;
  }
  return end;
}
// How long the white space at the start of `text` is.
std::size_t nbytes_of_space(std::string_view text) {
  std::size_t nbytes = 0;
  while (nbytes < text.size()) {
    std::size_t at = nbytes;
    if (!is_space(next_character(text, at))) break;
    nbytes = at;
  }
  return nbytes;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer,
                         const std::string& place)
    : tokens_(std::move(tokens)) {
  RegexScratch scratch;
  std::string buffer;
  for (AddedToken& token : tokens_) {
    token.text = token.normalized ? normalizer.normalized(token.content, scratch, buffer)
                                  : std::string_view(token.content);
    const auto require = [&](bool ok, const char* what) {
      engine::require<engine::IoError>(ok,
                                       "[tokenizer] expected added tokens {}, got {} of {} ({})",
                                       what, engine::excerpt(token.content), token.id, place);
    };
    require(!token.text.empty(), "that are not empty");
    require((token.normalized ? after_ : before_).add(token), "that differ");
  }
}

const AddedTokens::Finder::Node* AddedTokens::Finder::child(const Node& node, char byte) const {
  const auto found =
      std::ranges::lower_bound(node.next, byte, {}, &std::pair<char, std::uint32_t>::first);
  if (found == node.next.end() || found->first != byte) return nullptr;
  return &nodes_[found->second];
}

bool AddedTokens::Finder::add(const AddedToken& token) {
  begins_[static_cast<unsigned char>(token.text[0])] = true;
  std::uint32_t at = 0;
  for (const char byte : token.text) {
    auto& next = nodes_[at].next;
    const auto place =
        std::ranges::lower_bound(next, byte, {}, &std::pair<char, std::uint32_t>::first);
    if (place != next.end() && place->first == byte) {
      at = place->second;
    } else {
      at = static_cast<std::uint32_t>(nodes_.size());
      next.insert(place, {byte, at});
      nodes_.emplace_back();
    }
  }
  if (nodes_[at].token != nullptr) return false;
  nodes_[at].token = &token;
  return true;
}

const AddedToken* AddedTokens::Finder::find(std::string_view text, std::size_t at,
                                            std::size_t& end) const {
  const AddedToken* longest = nullptr;
  const Node* node = nodes_.data();
  for (; at < text.size(); ++at) {
    node = child(*node, text[at]);
    if (node == nullptr) break;
    if (node->token != nullptr) {
      longest = node->token;
      end = at + 1;
    }
  }
  return longest;
}

void AddedTokens::Finder::visit(std::string_view text, const Visit& visit) const {
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = 0;
    const AddedToken* const token =
        begins_[static_cast<unsigned char>(text[at])] ? find(text, at, end) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = std::exchange(at, end);
    if (token->single_word &&
        (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) {
      continue;
    }
    // The white space between two tokens is the first one's, if both take it.
    if (token->lstrip) begin = std::max(end_without_space(text.substr(0, begin)), done);
    if (token->rstrip) end += nbytes_of_space(text.substr(end));
    if (done < begin) visit(nullptr, text.substr(done, begin - done));
    visit(token, {});
    done = end;
  }
  if (done < text.size()) visit(nullptr, text.substr(done));
}

}  // namespace tessera::tools
