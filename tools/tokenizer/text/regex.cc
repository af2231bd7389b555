#include "tools/tokenizer/text/regex.h"

#include <cstdint>
#include <new>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/tokenizer/text/regex_syntax.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;

constexpr std::size_t kMaxPatternNbytes = 1 << 16;
// Steps of one search: a few tenths of a second.
constexpr std::uint32_t kMaxSteps = 10'000'000;
constexpr std::size_t kMinStackNbytes = 1 << 15, kMaxStackNbytes = 1 << 24;

template <auto free>
struct Free {
  template <class T>
  void operator()(T* p) const {
    free(p);
  }
};
template <class T, auto free>
using Owned = std::unique_ptr<T, Free<free>>;

std::string error_text(int code) {
  std::string text(256, '\0');
  auto* const data = reinterpret_cast<PCRE2_UCHAR*>(text.data());
  const int size = pcre2_get_error_message(code, data, text.size());
  text.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
  return text;
}

}  // namespace

struct RegexScratch::Parts {
  Owned<pcre2_match_data, pcre2_match_data_free> match{pcre2_match_data_create(1, nullptr)};
  Owned<pcre2_match_context, pcre2_match_context_free> context{pcre2_match_context_create(nullptr)};
  Owned<pcre2_jit_stack, pcre2_jit_stack_free> stack{
      pcre2_jit_stack_create(kMinStackNbytes, kMaxStackNbytes, nullptr)};
};

RegexScratch::RegexScratch() : parts_(std::make_unique<Parts>()) {
  if (!parts_->match || !parts_->context || !parts_->stack) throw std::bad_alloc();
  pcre2_set_match_limit(parts_->context.get(), kMaxSteps);
  pcre2_jit_stack_assign(parts_->context.get(), nullptr, parts_->stack.get());
}
RegexScratch::~RegexScratch() = default;
RegexScratch::RegexScratch(RegexScratch&& other) noexcept = default;
RegexScratch& RegexScratch::operator=(RegexScratch&& other) noexcept = default;

Regex::Regex(const std::string& pattern, std::string place)
    : pattern_(pattern), place_(std::move(place)) {
  require<IoError>(pattern.size() <= kMaxPatternNbytes,
                   "[tokenizer] expected a regular expression of at most {} bytes, got {} ({})",
                   kMaxPatternNbytes, pattern.size(), place_);
  const std::string text = to_pcre2(pattern, place_);
  const Owned<pcre2_compile_context, pcre2_compile_context_free> context(
      pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE at = 0;
  code_ = {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                         PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &at, context.get()),
           pcre2_code_free};
  require<IoError>(code_ != nullptr,
                   "[tokenizer] expected a regular expression, got {}: {} at byte {} ({})",
                   engine::excerpt(pattern), error_text(error), at, place_);
  is_compiled_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

bool Regex::find(std::string_view text, std::size_t from, RegexScratch& scratch,
                 Range& match) const {
  const RegexScratch::Parts& parts = *scratch.parts_;
  const auto* const data = reinterpret_cast<PCRE2_SPTR>(text.data());
  const auto search = is_compiled_ ? pcre2_jit_match : pcre2_match;
  const int code = search(code_.get(), data, text.size(), from, PCRE2_NO_UTF_CHECK,
                          parts.match.get(), parts.context.get());
  if (code == PCRE2_ERROR_NOMATCH) return false;
  if (code == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
  if (code < 0) {
    fail<IoError>("[tokenizer] expected {} to end on the text, got: {} ({})",
                  engine::excerpt(pattern_), error_text(code), place_);
  }
  const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(parts.match.get());
  match = {range[0], range[1]};
  return true;
}

std::size_t Regex::after_character(std::string_view text, std::size_t at) {
  if (at >= text.size()) return text.size() + 1;
  next_character(text, at);
  return at;
}

}  // namespace tessera::tools
