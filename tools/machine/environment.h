// What launchers and people leave in the environment of a program, and what of it nothing heeds.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

using Environment = std::map<std::string, std::string>;
/// Of this process.
Environment environment();

/// The variables of TESSERA_* that something reads.
inline constexpr std::array<std::string_view, 4> kVariablesRead = {
    "TESSERA_CPU_GEMM", "TESSERA_CPU_ISA", "TESSERA_CPU_THREADS", "TESSERA_SECRET"};
/// The names that begin with TESSERA_ and that nothing reads, as of slips of the keyboard.
std::vector<std::string> unread_variables(const Environment& environment);

/// A number from 0 on; 0 for anything else.
int count_of(std::string_view text);

}  // namespace tessera::tools
