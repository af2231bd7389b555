// SHA-256 (FIPS 180-4), fed piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;  // libcrypto's EVP_MD_CTX

namespace tessera::tools {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  /// The digest of everything so far, as 64 lower-case hex digits. More updates may follow.
  std::string hex() const;

 private:
  using Context = std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)>;
  static Context new_context();

  Context context_;
};

}  // namespace tessera::tools
