// Regular expressions as files of tokenizers have them, for PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

/// `pattern`, which is meant for Oniguruma, with what PCRE2 reads otherwise said in its words: \s
/// and \w, names of scripts. Throws IoError, which ends with `place` in brackets, for what has no
/// such words, such as \b, classes in classes and (?s). PCRE2 itself refuses what is no expression.
std::string to_pcre2(std::string_view pattern, std::string_view place);

/// An expression that matches `text` alone.
std::string literal_pattern(std::string_view text);

}  // namespace tessera::tools
