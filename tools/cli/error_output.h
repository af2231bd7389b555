// What is said on stderr, which may be a terminal that was stopped or a pipe that nobody reads.
#pragma once

#include <chrono>
#include <initializer_list>
#include <string_view>

namespace tessera::tools {

/// For a warning during work that others wait for.
inline constexpr std::chrono::milliseconds kWarningPatience{1000};
/// For an error after which the process ends, and must.
inline constexpr std::chrono::milliseconds kErrorPatience{5000};
/// For whoever has all the time of the reader.
inline constexpr std::chrono::milliseconds kNoHurry{-1};

/// Writes `parts`, one after the other, to stderr. What finds no room for `patience` is lost, and
/// so is what cannot be written. Asks for no memory; throws nothing.
void write_to_stderr(std::initializer_list<std::string_view> parts,
                     std::chrono::milliseconds patience) noexcept;

}  // namespace tessera::tools
