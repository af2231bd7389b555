#include "comm/control/handshake.h"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cstring>
#include <span>

#include "comm/net/random.h"
#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::comm::control {
namespace {

Proof prove(std::string_view secret, std::string_view side, const Hello& hello,
            const Nonce& server_nonce) {
  // As a frame, so that no two different sets of values have the same bytes.
  Hello said = hello;
  said.host = side;
  said.pid = 0;
  const std::string text =
      encode(std::move(said)) + std::string(server_nonce.data(), server_nonce.size());
  Proof proof;
  unsigned size = 0;
  // The pointer of an empty secret must not be null: that would mean the secret of the last call.
  const bool done =
      HMAC(EVP_sha256(), secret.empty() ? "" : secret.data(), static_cast<int>(secret.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(),
           reinterpret_cast<unsigned char*>(proof.data()), &size) != nullptr;
  engine::require<engine::Error>(done && size == proof.size(),
                                 "[control] expected libcrypto to succeed, got a failure");
  return proof;
}

}  // namespace

Nonce draw_nonce() {
  Nonce nonce;
  net::draw(std::as_writable_bytes(std::span(nonce)));
  return nonce;
}

std::string name_of(const Hello& hello) {
  return fmt::format("process {} ({}, pid {})", hello.process, engine::excerpt(hello.host, 64),
                     hello.pid);
}

std::string declined_text(const Hello& hello, std::string_view why_not) {
  return fmt::format("[control] expected {} processes to join, got an error of {}: {}",
                     hello.num_processes, name_of(hello), why_not);
}

Proof server_proof(std::string_view secret, const Hello& hello, const Nonce& server_nonce) {
  return prove(secret, "server", hello, server_nonce);
}

Proof client_proof(std::string_view secret, const Hello& hello, const Nonce& server_nonce) {
  return prove(secret, "client", hello, server_nonce);
}

bool are_equal(const Proof& a, const Proof& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::optional<NotThere> introduce(Connection& connection, const Hello& hello,
                                  std::string_view secret, net::Time deadline,
                                  std::string_view why_not) {
  connection.queue(hello);
  std::optional<Frame> frame;
  try {
    frame = connection.wait_for_next(deadline);
  } catch (const engine::CommError&) {
    return NotThere{"another program"};
  }
  if (!frame) return NotThere{connection.ended() ? "an end" : "no answer"};
  if (const auto* refusal = std::get_if<Refusal>(&*frame)) {
    return NotThere{engine::excerpt(refusal->why, 1000), true};
  }
  const auto* challenge = std::get_if<Challenge>(&*frame);
  if (challenge == nullptr) return NotThere{"another program"};
  if (!are_equal(challenge->proof, server_proof(secret, hello, challenge->nonce))) {
    // Its own proof would only help who tries to find out the secret.
    connection.queue(Refusal{.why = "another secret"});
    connection.flush();
    return NotThere{"another secret", true};
  }
  connection.queue(Answer{.proof = client_proof(secret, hello, challenge->nonce),
                          .why_not = std::string(why_not)});
  connection.flush();
  return std::nullopt;
}

}  // namespace tessera::comm::control
