// Which cublasLt algorithm multiplies which shapes. Without one of these every product takes the
// first algorithm that cublasLt proposes, the same in every run. With one, algorithms are chosen by
// time, once, and kept as text, so that all ranks and all runs agree on the choice and so on bits.
//
//   auto algorithms = std::make_shared<GemmAlgorithms>(/*tune=*/true);
//   algorithms->load(text_of_file, "gemm.txt");          // what an earlier run has chosen
//   set_gemm_algorithms(compute, algorithms);            // before the first product
//   ... algorithms->text() ...                           // to be written back
//
// The text is a header line and then one line an entry: key, tab, 16 words of 8 hexadecimal digits.
// A key names the version of cublasLt, the GPU and the product: entries of others stay unused.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "engine/stream.h"

namespace tessera::engine {

/// Thread-safe: ranks that are threads share one.
class GemmAlgorithms {
 public:
  /// What cublasLt says may be stored and restored for the same version of the library.
  using Algorithm = std::array<std::uint32_t, 16>;

  /// `tune`: a product without an entry is timed with every algorithm proposed, which synchronises
  /// with the GPU and takes workspace as large as the result. Otherwise it takes the first one.
  explicit GemmAlgorithms(bool tune) : tunes_(tune) {}

  /// Adds entries. Throws IoError naming `file` and the line of what is malformed or contradicts an
  /// entry already there; then nothing is added.
  void load(std::string_view text, std::string_view file);
  /// All entries, sorted; load() reads it.
  std::string text() const;

  bool tunes() const { return tunes_; }
  std::optional<Algorithm> find(const std::string& key) const;
  /// The entry of `key`: the first one inserted stays.
  Algorithm insert(const std::string& key, const Algorithm& algorithm);

 private:
  const bool tunes_;
  mutable std::mutex mutex_;
  std::map<std::string, Algorithm> entries_;
};

/// Products on `stream`, a CUDA stream, take their algorithms from here on. Defined where CUDA is
/// built.
void set_gemm_algorithms(const Stream& stream, std::shared_ptr<GemmAlgorithms> algorithms);

}  // namespace tessera::engine
