// What a run that goes on has otherwise than the one that it goes on from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// "cpu.isa=v4 (was v3)" of each value that both texts have and that differs in `now`: lines of
/// name = value below [section], as FlagSet::to_toml() writes them.
std::vector<std::string> changed_values(std::string_view before, std::string_view now);

/// changed_values() of configurations that are about what is computed or how ranks share it, but
/// for their number and where data lie.
std::vector<std::string> changed_settings(std::string_view before, std::string_view now);

/// Whether some of these changes make another part of the data of a sample.
bool moves_samples(const std::vector<std::string>& changes);

}  // namespace tessera::tools
