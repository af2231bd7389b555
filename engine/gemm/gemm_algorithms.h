// Which cublasLt algorithm multiplies which shapes. Without one of these every product takes the
// first algorithm that cublasLt proposes, the same in every run. With one, algorithms are chosen by
// time, ahead of the run, and kept as text, so that all ranks and all runs agree on the choice and
// so on bits.
//
//   auto algorithms = std::make_shared<GemmAlgorithms>();
//   algorithms->load(text_of_file, "gemm.txt");          // what an earlier run has chosen
//   tune_gemms(compute, gemms, *algorithms);             // what it has not; see record_gemms()
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
#include <vector>

#include "engine/gemm/gemm_cuda.h"
#include "engine/stream.h"

namespace tessera::engine {

/// Thread-safe: ranks that are threads share one.
class GemmAlgorithms {
 public:
  /// What cublasLt says may be stored and restored for the same version of the library.
  using Algorithm = std::array<std::uint32_t, 16>;

  /// Adds entries. Throws IoError naming `file` and the line of what is malformed or contradicts an
  /// entry already there; then nothing is added.
  void load(std::string_view text, std::string_view file);
  /// All entries, sorted; load() reads it.
  std::string text() const;

  std::int64_t size() const;
  std::optional<Algorithm> find(const std::string& key) const;
  /// The entry of `key`: the first one inserted stays.
  Algorithm insert(const std::string& key, const Algorithm& algorithm);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Algorithm> entries_;
};

/// Products on `stream`, a CUDA stream, take their algorithms from here on; those without an entry
/// the first one proposed. Defined where CUDA is built.
void set_gemm_algorithms(const Stream& stream, std::shared_ptr<GemmAlgorithms> algorithms);

/// "cublasLt 120205 | NVIDIA H100 80GB HBM3": what multiplies on `stream`, a CUDA stream, as keys
/// name it. Defined where CUDA is built.
std::string gemm_cuda_library(const Stream& stream);

/// Adds to `gemms`, from here on, each product that `stream` is asked for, once, with alignments,
/// up to 16, in the place of addresses. For streams of GPUs, also of those that are not there
/// (engine/meta.h). Null: no more. Defined where CUDA is built.
void record_gemms(const Stream& stream, std::shared_ptr<std::vector<DeviceProduct>> gemms);

/// A product that was timed.
struct TunedGemm {
  DeviceProduct gemm;
  double first_ms;        ///< by the first algorithm proposed; with GELU or its slope: apart
  double ms;              ///< by the fastest
  int num_proposed;       ///< algorithms
  std::string algorithm;  ///< the fastest, in words: "id 66, tile 18, stages 36", "GELU apart"
};

/// Gives each product of `gemms` that has no entry the fastest of the algorithms proposed, timed on
/// `stream`, a CUDA stream with nothing else to do, in memory of its own that is given back.
/// Blocks. Returns what was timed. Throws DeviceError. Defined where CUDA is built.
std::vector<TunedGemm> tune_gemms(const Stream& stream, const std::vector<DeviceProduct>& gemms,
                                  GemmAlgorithms& algorithms);

}  // namespace tessera::engine
