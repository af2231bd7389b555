// A checkpoint that does not fit a training, in few lines that say why.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools {

/// `error` and below it, a line each, the options that have changed since the checkpoint was saved.
std::string with_changes(std::string error, const std::vector<std::string>& changes);

/// `error` lists tensors, one a line and two blanks before each: of each kind of difference the
/// first few stay, and a line counts the others. Below them are with_changes(), and that
/// --checkpoint.strict=false goes on, where it does. An error without such a list stays as it is.
std::string misfit_text(const std::string& error, const std::vector<std::string>& changes);

}  // namespace tessera::tools
