// What the other end of a connection of the control plane says: frames, which come in pieces of as
// many bytes as the first byte says, before it is known (first byte even) or after.
#include <algorithm>
#include <string>

#include "comm/control/protocol.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const char* const kTarget = "control_frames";

void consume(std::string_view input) {
  namespace control = comm::control;
  if (input.empty()) return;
  const auto first = static_cast<unsigned char>(input[0]);
  const std::size_t max_nbytes =
      first % 2 == 0 ? control::kMaxFirstNbytes : control::kMaxFrameNbytes;
  control::FrameReader reader;
  std::string read_back;
  const std::string_view bytes = input.substr(1);
  for (std::string_view rest = bytes; !rest.empty();) {
    const std::size_t nbytes = std::min<std::size_t>(rest.size(), first / 2 + 1);
    reader.feed(rest.substr(0, nbytes));
    rest.remove_prefix(nbytes);
    while (auto frame = reader.next(max_nbytes)) read_back += control::encode(std::move(*frame));
  }
  promise(bytes.starts_with(read_back), "expected frames that are written as they were read");
}

}  // namespace tessera::fuzz
