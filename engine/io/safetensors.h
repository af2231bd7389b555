// The safetensors format (github.com/huggingface/safetensors): 8 bytes of header length, a JSON
// header, then the bytes of all tensors without gaps. Files are untrusted: see [Note: safetensors
// rules] in safetensors_header.cc.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/dtype.h"
#include "engine/io/file.h"
#include "engine/io/safetensors_header.h"

namespace tessera::engine {

/// A file open for reading. Only the header is held; tensors are read on demand, and reading is
/// thread-safe.
class SafetensorsFile {
 public:
  /// Validates the whole header first. Throws IoError naming the file, and the tensor at fault.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  /// nullptr when there is none of that name.
  const TensorInfo* find(std::string_view name) const;

  /// Whether read() can: F32, or BF16 and F16, which convert exactly.
  static bool can_read(const TensorInfo& tensor);
  /// Elements [first, first + out.size()) of a tensor of this file. Throws IoError for other
  /// dtypes, InvalidArgument for elements it has not.
  void read(const TensorInfo& tensor, std::int64_t first, std::span<float> out) const;

 private:
  template <class Stored>
  void read_as(std::int64_t offset, std::span<float> out) const;

  InputFile file_;
  std::int64_t data_offset_ = 0;  // bytes before the tensors
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

/// A tensor to be written, or expected in a file.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kF32;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

/// The format's name of a dtype: "F32".
std::string_view safetensors_dtype(DType dtype);
/// The bytes of a file before its tensors: length, header, and spaces up to a multiple of 8. Throws
/// InvalidArgument for names that the format does not allow and for names that come twice.
std::string safetensors_prefix(std::span<const TensorSpec> tensors,
                               const SafetensorsMetadata& metadata, std::string_view path);

/// Writes a file of f32 tensors, one after the other; the file appears whole, or not at all (see
/// AtomicFile).
class SafetensorsWriter {
 public:
  /// `tensors`: all that will be written, in that order, f32. Throws as safetensors_prefix();
  /// IoError naming the path.
  SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                    const SafetensorsMetadata& metadata = {{"format", "pt"}});

  /// The next tensor, whole. Throws InvalidArgument when it is not the next or of another size.
  void write(std::string_view name, std::span<const float> data);
  /// After the last tensor: AtomicFile::commit(). Throws InvalidArgument when some are missing.
  void finish();
  /// finish() in parts, to replace the file together with others: flush(), then replace(), which
  /// leaves flushing the folder to the caller.
  void flush();
  void replace() { file_.replace(); }

 private:
  AtomicFile file_;
  std::vector<TensorSpec> tensors_;
  std::size_t next_ = 0;
};

}  // namespace tessera::engine
