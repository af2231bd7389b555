// Files that another process has just written, perhaps on another host: network file systems (NFS)
// remember what a folder held, for up to a minute, and so may show them late.
#pragma once

#include <functional>
#include <string>

namespace tessera::engine {

/// Opens the folders that lead to `path`, and what is there: a network file system then asks for
/// what is new of them. What cannot be opened does not matter.
void look_again(const std::string& path);

/// For a file that another process says is there: whether `sees()` comes true within five seconds.
/// Where it does not at once, it is asked again every 50 ms, each time after look_again(path).
bool seen_late(const std::string& path, const std::function<bool()>& sees);

}  // namespace tessera::engine
