// Whether an output folder is a run's own to write to.
#pragma once

#include <array>
#include <string>

namespace tessera::tools {

/// Texts that a run may leave in its folder, and that the next one there removes.
inline constexpr std::array kRunTexts = {"sample.txt", "comm_hook.txt"};

/// Throws InvalidArgument when a run that writes to `folder` would replace a file that no run has
/// left there: a config.toml of another program or by hand, or, in a folder where no run has been,
/// a sample.txt, comm_hook.txt, flight.json or log.jsonl (`writes_log`: the run's log goes there).
/// Empty files and what cannot be told are not held against it.
void check_run_folder(const std::string& folder, bool writes_log);

}  // namespace tessera::tools
