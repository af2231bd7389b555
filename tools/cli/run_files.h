// The files of a run, by the options that name them: none that is read may be written.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

struct RunFile {
  std::string option;  ///< that says so: "data.path"
  std::string path;
};

/// Throws InvalidArgument when one of `written` is one of `others`, under whatever names and
/// through whatever links, naming both options and paths. Pipes and devices are nobody's.
void check_files_differ(std::span<const RunFile> written, std::span<const RunFile> others);

/// Whether `path` is `folder`, or below it, whatever links lead there. Neither need be there.
bool lies_in(const std::string& path, const std::string& folder);

/// Throws InvalidArgument when one of `files` is `folder`, lies below it, or is one of the files
/// there by another name or link, naming both. `folder.option` says what it is: "a checkpoint".
void check_files_outside(std::span<const RunFile> files, const RunFile& folder);

/// The files of `folder` whose names end in one of `endings`. None if it cannot be read.
std::vector<RunFile> files_of(const std::string& option, const std::string& folder,
                              std::span<const std::string_view> endings);

}  // namespace tessera::tools
