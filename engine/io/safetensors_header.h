// The header of a safetensors file: parsed and validated before a byte of any tensor is used.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::engine {

/// A tensor in a file.
struct TensorInfo {
  std::string name;
  std::string dtype;                ///< as the format spells it: "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape;  ///< empty: a scalar
  std::int64_t begin = 0;           ///< bytes, from the end of the header
  std::int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< in order of their bytes
  std::map<std::string, std::string> metadata;
};

/// The format's own limit on the header, in bytes.
inline constexpr std::int64_t kMaxSafetensorsHeaderNbytes = 100'000'000;

std::int64_t numel(std::span<const std::int64_t> shape);
/// "(2, 3)"
std::string to_string(std::span<const std::int64_t> shape);

/// Parses `json`, the header of a file with `buffer_nbytes` bytes after it. Throws IoError naming
/// `path` and the tensor at fault; see [Note: safetensors rules].
SafetensorsHeader parse_safetensors_header(std::string_view json, std::int64_t buffer_nbytes,
                                           std::string_view path);

/// A name as error messages show it: quoted, escaped and not too long.
std::string shown_name(std::string_view name);

}  // namespace tessera::engine
