#include "engine/io/late_files.h"

#include <fcntl.h>

#include <chrono>
#include <cstddef>
#include <thread>

#include "engine/io/file.h"

namespace tessera::engine {
namespace {

void open_and_close(const std::string& path) {
  const FileDescriptor opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
}

}  // namespace

void look_again(const std::string& path) {
  // From the first to the last: a folder that is not known yet is found in the one above.
  for (std::size_t end = path.find('/', 1); end != path.npos; end = path.find('/', end + 1)) {
    open_and_close(path.substr(0, end));
  }
  open_and_close(path);
}

bool seen_late(const std::string& path, const std::function<bool()>& sees) {
  constexpr std::chrono::milliseconds kPatience(5000), kSleep(50);
  for (std::chrono::milliseconds slept(0); !sees(); slept += kSleep) {
    if (slept >= kPatience) return false;
    std::this_thread::sleep_for(kSleep);
    look_again(path);
  }
  return true;
}

}  // namespace tessera::engine
