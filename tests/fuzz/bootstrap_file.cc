// What lies where rank 0 expects rank 1's file (first byte even), or rank 1 that of rank 0 (odd).
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "comm/bootstrap/bootstrap.h"
#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {
namespace {

constexpr std::size_t kHandshakeNbytes = 16, kNonceNbytes = 16;
constexpr std::chrono::minutes kPatience{1};  // which only a busy disk takes

void put(const testing::TempFolder& folder, const std::string& name, std::string_view bytes) {
  const std::string draft = folder.write("draft", bytes);
  ::chmod(draft.c_str(), S_IRUSR | S_IWUSR);
  std::filesystem::rename(draft, folder / name);
}

/// Runs `rank`, with `other` beside it, which looks on until it returns true or the rank ends.
template <class Other>
std::vector<std::byte> run_beside(const std::string& place, int rank, Other other) {
  std::atomic<bool> done = false;
  std::jthread beside([&] {
    while (!other() && !done) std::this_thread::yield();
  });
  const struct End {
    std::atomic<bool>& done;
    ~End() { done = true; }
  } end{done};
  return comm::bootstrap(place, rank, 2, std::vector<std::byte>(3), kPatience);
}

}  // namespace

const char* const kTarget = "bootstrap_file";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  if (input.empty()) return;
  const std::string path = folder / "id", place = "file:" + path;
  std::string text(input.substr(1));
  for (const char* const name : {"id", "id.1", "draft"}) std::filesystem::remove(folder / name);
  if (input[0] % 2 == 0) {
    put(folder, "id.1", text);
    // Rank 1 removes its file when it has the answer.
    run_beside(place, 0, [&] {
      return ::access(path.c_str(), F_OK) == 0 && ::unlink((path + ".1").c_str()) == 0;
    });
    return;
  }
  run_beside(place, 1, [&] {
    const std::string asked = folder.read("id.1");
    if (asked.size() < kHandshakeNbytes + kNonceNbytes) return false;
    // Its number is what no stranger knows; without it every answer is one to others.
    if (text.size() >= kHandshakeNbytes + 2 * kNonceNbytes) {
      std::memcpy(text.data() + kHandshakeNbytes + kNonceNbytes, asked.data() + kHandshakeNbytes,
                  kNonceNbytes);
    }
    put(folder, "id", text);
    return true;
  });
}

}  // namespace tessera::fuzz
