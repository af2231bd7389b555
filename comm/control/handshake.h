// How a process and process 0 prove to each other that they know the secret, without saying it.
//
//   process                               process 0
//   Hello: who it is, and a nonce   ->
//                                   <-    Challenge: a nonce, and a proof over both
//   Answer: a proof over both       ->
//
// A proof is HMAC-SHA256 by the secret. Both nonces are fresh for each connection, so what was
// heard once opens nothing; each side proves another text, so neither can hand back what it heard.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "comm/control/connection.h"
#include "comm/control/protocol.h"

namespace tessera::comm::control {

Nonce draw_nonce();
/// "process 1 (h1, pid 4711)"
std::string name_of(const Hello& hello);
/// Of a job that fails as that process will not join.
std::string declined_text(const Hello& hello, std::string_view why_not);
/// What process 0 proves to who said `hello`, and what that process proves.
Proof server_proof(std::string_view secret, const Hello& hello, const Nonce& server_nonce);
Proof client_proof(std::string_view secret, const Hello& hello, const Nonce& server_nonce);
/// In a time that does not say where they differ.
bool are_equal(const Proof& a, const Proof& b);

/// Why process 0 is not where a process introduced itself.
struct NotThere {
  std::string why;
  bool is_refusal = false;  ///< it is, or may be, and wants none of this process
};
/// Says `hello` and the rest of the process's part, with `why_not` in the end, as in Answer.
/// Nothing: process 0 has proved itself.
std::optional<NotThere> introduce(Connection& connection, const Hello& hello,
                                  std::string_view secret, net::Time deadline,
                                  std::string_view why_not = "");

}  // namespace tessera::comm::control
