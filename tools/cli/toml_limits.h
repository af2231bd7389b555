// What a TOML file may ask of its parser.
#pragma once

#include <string_view>

namespace tessera::tools {

/// Throws IoError naming `path` and the line when `text` has names of more than 16 parts, brackets
/// nested over 16 levels, more than 4096 keys, tables and elements, or a table header without a
/// name. toml++ 3.3 recurses over names and brackets, so that 200 KB overflow the stack, looks
/// tables up one by one, and asserts that a header has a name. All else that is wrong is left to
/// the parser.
void check_toml_limits(std::string_view text, std::string_view path);

}  // namespace tessera::tools
