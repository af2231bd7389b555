// Names of options: "train.steps" is the key `steps` of the section `train`.
#pragma once

#include <string_view>
#include <vector>

namespace tessera::tools {

/// All before the last dot; empty: none.
std::string_view section_of(std::string_view name);
/// What follows the last dot.
std::string_view key_of(std::string_view name);

/// Which of `names` a person meant who typed `name`: within two slips of the keyboard, where a
/// missing or wrong section is one. Empty: none.
std::string_view nearest_name(std::string_view name, const std::vector<std::string_view>& names);

}  // namespace tessera::tools
