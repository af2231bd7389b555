#include "tests/fuzz/target.h"

#include "engine/error.h"

namespace tessera::fuzz {

bool is_accepted(std::string_view input) {
  // A list of differences may be long, but not as long as a hostile file.
  constexpr std::size_t kMaxMessageNbytes = 1 << 14;
  try {
    consume(input);
  } catch (const engine::Error& error) {
    const std::string_view message = error.what();
    promise(message.starts_with('['), "expected an error that says where");
    promise(message.size() <= kMaxMessageNbytes, "expected an error of a screen at most");
    return false;
  }
  return true;
}

}  // namespace tessera::fuzz
