// The command line of compare as a FlagSet takes it, where an option stands once and has one value.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::tools {

/// Between the two values of --find-divergence, in find_divergence.
inline constexpr char kPairSeparator = '\n';

/// All --sweep as one, and --find-divergence A B as --find_divergence=A\nB. Throws InvalidArgument
/// for a sweep without values, and unless --find-divergence has two.
std::vector<std::string> joined_arguments(std::span<const char* const> arguments);

/// The `arguments` that do not give the option `key` a value.
std::vector<std::string> without(const std::vector<std::string>& arguments, const std::string& key);

}  // namespace tessera::tools
