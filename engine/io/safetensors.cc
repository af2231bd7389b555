#include "engine/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "engine/dtype.h"
#include "engine/error.h"
#include "engine/io/json.h"

namespace tessera::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

constexpr std::int64_t kPrefixNbytes = 8;  // the header's length

/// IEEE 754 half precision.
struct Float16 {
  std::uint16_t bits = 0;

  float to_float() const {
    const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = bits & 0x7C00u;
    const std::uint32_t fraction = bits & 0x03FFu;
    // Subnormal: an integer times 2^-24, which f32 holds as a normal number.
    const auto small = std::bit_cast<std::uint32_t>(static_cast<float>(fraction) * 0x1.0p-24f);
    constexpr std::uint32_t kRebias = (127 - 15) << 23;  // twice where the exponent is all ones
    const std::uint32_t bias = exponent == 0x7C00u ? 2 * kRebias : kRebias;
    const std::uint32_t normal = ((exponent | fraction) << 13) + bias;
    return std::bit_cast<float>(sign | (exponent == 0 ? small : normal));
  }
};

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : file_(std::move(path)) {
  const std::int64_t nbytes = file_.nbytes();
  require<IoError>(
      nbytes >= kPrefixNbytes,
      "[safetensors] expected 8 bytes of header length, got {} bytes: the file was cut short ({})",
      nbytes, file_.path());
  std::uint64_t length = 0;
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const std::int64_t max = std::min(kMaxSafetensorsHeaderNbytes, nbytes - kPrefixNbytes);
  require<IoError>(std::cmp_less_equal(length, max) && length >= 2,
                   "[safetensors] expected a header of 2 to {} bytes, got {}: the file was cut "
                   "short, or is none of safetensors ({})",
                   max, length, file_.path());
  std::string json(length, '\0');
  file_.read(kPrefixNbytes, std::as_writable_bytes(std::span(json)));
  data_offset_ = kPrefixNbytes + std::ssize(json);
  header_ = parse_safetensors_header(json, nbytes - data_offset_, file_.path());
  for (const TensorInfo& tensor : header_.tensors) by_name_.emplace(tensor.name, &tensor);
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

bool SafetensorsFile::can_read(const TensorInfo& tensor) {
  return tensor.dtype == "F32" || tensor.dtype == "BF16" || tensor.dtype == "F16";
}

template <class Stored>
void SafetensorsFile::read_as(std::int64_t offset, std::span<float> out) const {
  std::vector<Stored> stored(std::min<std::size_t>(out.size(), 1 << 16));
  while (!out.empty()) {
    const auto part = std::span(stored).first(std::min(stored.size(), out.size()));
    file_.read(offset, std::as_writable_bytes(part));
    std::ranges::transform(part, out.begin(), [](Stored x) { return x.to_float(); });
    offset += static_cast<std::int64_t>(part.size_bytes());
    out = out.subspan(part.size());
  }
}

void SafetensorsFile::read(const TensorInfo& tensor, std::int64_t first,
                           std::span<float> out) const {
  require(first >= 0 && std::ssize(out) <= numel(tensor.shape) - first,
          "[safetensors] expected elements inside {}, got [{}, {}) (tensor {}, {})",
          to_string(tensor.shape), first, first + std::ssize(out), shown_name(tensor.name), path());
  require<IoError>(can_read(tensor),
                   "[safetensors] expected F32, BF16 or F16, got {} (tensor {}, {})", tensor.dtype,
                   shown_name(tensor.name), path());
  const std::int64_t start = data_offset_ + tensor.begin;
  if (tensor.dtype == "F32") {
    file_.read(start + first * size_of(DType::kF32), std::as_writable_bytes(out));
  } else if (tensor.dtype == "BF16") {
    read_as<BFloat16>(start + first * 2, out);
  } else {
    read_as<Float16>(start + first * 2, out);
  }
}

std::string_view safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
  }
  return "";
}

std::string safetensors_prefix(std::span<const TensorSpec> tensors,
                               const SafetensorsMetadata& metadata, std::string_view path) {
  std::string json = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (json.back() != '{') json += ',';
    json += json_literal(key) + ":" + json_literal(value);
  }
  json += '}';
  std::int64_t offset = 0;
  for (const auto& [name, shape, dtype] : tensors) {
    const std::int64_t end = offset + numel(shape) * size_of(dtype);
    std::string dims = to_string(shape);
    dims.front() = '[';
    dims.back() = ']';
    json += fmt::format(R"(,{}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})",
                        json_literal(name), safetensors_dtype(dtype), dims, offset, end);
    offset = end;
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  // What we would refuse to read we refuse to write: names above all.
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(json, offset, path);
  } catch (const IoError& error) {
    throw InvalidArgument(error.what());
  }
  for (const TensorSpec& tensor : tensors) {
    const auto same_name = [&](const TensorInfo& info) { return info.name == tensor.name; };
    require(std::ranges::any_of(header.tensors, same_name),
            "[safetensors] expected names in UTF-8, got {} ({})", shown_name(tensor.name), path);
  }
  const auto length = std::bit_cast<std::array<char, kPrefixNbytes>>(json.size());
  return std::string(length.data(), length.size()) + json;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                                     const SafetensorsMetadata& metadata)
    : file_(std::move(path)), tensors_(std::move(tensors)) {
  const std::string prefix = safetensors_prefix(tensors_, metadata, file_.path());
  file_.write(std::as_bytes(std::span(prefix)));
}

void SafetensorsWriter::write(std::string_view name, std::span<const float> data) {
  require(next_ < tensors_.size(), "[safetensors] expected no more tensors, got {} ({})",
          shown_name(name), file_.path());
  const TensorSpec& next = tensors_[next_];
  require(next.name == name && numel(next.shape) == std::ssize(data),
          "[safetensors] expected tensor {} of {} elements, got {} of {} ({})",
          shown_name(next.name), numel(next.shape), shown_name(name), data.size(), file_.path());
  file_.write(std::as_bytes(data));
  ++next_;
}

void SafetensorsWriter::flush() {
  require(next_ == tensors_.size(), "[safetensors] expected {} tensors, got {} ({})",
          tensors_.size(), next_, file_.path());
  file_.flush();
}

void SafetensorsWriter::finish() {
  flush();
  replace();
  flush_folder_of(file_.path());
}

}  // namespace tessera::engine
