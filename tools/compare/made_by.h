// When, by which command and on what machine a comparison was made: what its figures mean nothing
// without.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

namespace tessera::tools {

/// The words of a command as a shell reads them: those with other characters than letters, digits
/// and _-./:=,+@% in single quotes.
std::string command_text(std::span<const std::string> words);

/// Of the git checkout that `folder` lies in: {"id": 40 hexadecimal digits, "changed": whether
/// files that git follows differ from it}. null: no checkout, or no git.
nlohmann::ordered_json commit_of(const std::string& folder);

/// {"begun": "2026-11-26 01:00:12 UTC", "command", "commit", "cpu", "cores": of the machine,
/// "usable_cores", "load": [over 1, 5 and 15 minutes], "memory_bytes": of the machine,
/// "compiler"}, as it is now. What the machine does not tell is null. `argv`: of main().
nlohmann::ordered_json made_by(std::span<const char* const> argv);

}  // namespace tessera::tools
