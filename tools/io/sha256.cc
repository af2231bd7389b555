#include "tools/io/sha256.h"

#include <openssl/evp.h>

#include <array>

#include "engine/error.h"

namespace tessera::tools {
namespace {

void check(bool ok) {
  engine::require<engine::Error>(ok, "[sha256] expected libcrypto to succeed, got a failure");
}

}  // namespace

Sha256::Context Sha256::new_context() {
  Context context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  check(context != nullptr);
  return context;
}

Sha256::Sha256() : context_(new_context()) {
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::update(std::span<const std::byte> bytes) {
  check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string Sha256::hex() const {
  const Context copy = new_context();  // finishing ends a context
  std::array<unsigned char, 32> digest{};
  check(EVP_MD_CTX_copy_ex(copy.get(), context_.get()) == 1 &&
        EVP_DigestFinal_ex(copy.get(), digest.data(), nullptr) == 1);
  std::string hex;
  for (const unsigned char byte : digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

}  // namespace tessera::tools
