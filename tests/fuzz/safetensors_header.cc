// Headers of safetensors: a line with the number of bytes after the header, then the header.
#include "engine/io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "engine/io/safetensors.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

/// Of a dtype that we write.
std::optional<engine::DType> written_dtype(const std::string& name) {
  using enum engine::DType;
  for (const engine::DType dtype : {kF32, kBF16, kI32, kI64, kU8}) {
    if (engine::safetensors_dtype(dtype) == name) return dtype;
  }
  return std::nullopt;
}

/// What we would write for the same tensors reads the same.
void write_and_read(const engine::SafetensorsHeader& header, std::int64_t nbytes) {
  std::vector<engine::TensorSpec> specs;
  for (const engine::TensorInfo& tensor : header.tensors) {
    const std::optional<engine::DType> dtype = written_dtype(tensor.dtype);
    if (!dtype) return;
    specs.push_back({tensor.name, tensor.shape, *dtype});
  }
  const std::string prefix = engine::safetensors_prefix(specs, header.metadata, "again");
  const auto again = engine::parse_safetensors_header(
      std::string_view(prefix).substr(sizeof(std::uint64_t)), nbytes, "again");
  promise(again.metadata == header.metadata, "expected the same metadata again");
  promise(again.tensors.size() == header.tensors.size(), "expected the same tensors again");
  for (const engine::TensorInfo& tensor : header.tensors) {
    const auto same = std::ranges::find(again.tensors, tensor.name, &engine::TensorInfo::name);
    promise(same != again.tensors.end() && same->shape == tensor.shape &&
                same->dtype == tensor.dtype && same->begin == tensor.begin &&
                same->end == tensor.end,
            "expected the same tensor again");
  }
}

}  // namespace

const char* const kTarget = "safetensors_header";

void consume(std::string_view input) {
  const std::int64_t nbytes = number_in(input);
  const std::string_view json = input.substr(std::min(input.find('\n'), input.size() - 1) + 1);
  if (nbytes < 0) return;
  const engine::SafetensorsHeader header = engine::parse_safetensors_header(json, nbytes, "input");
  std::int64_t end = 0;
  for (const engine::TensorInfo& tensor : header.tensors) {
    promise(tensor.begin == end && tensor.end >= end, "expected tensors without gaps");
    promise(engine::numel(tensor.shape) <= tensor.end - tensor.begin, "expected room for a tensor");
    end = tensor.end;
  }
  promise(end == nbytes, "expected tensors up to the end");
  write_and_read(header, nbytes);
}

}  // namespace tessera::fuzz
