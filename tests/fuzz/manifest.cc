// Manifests of checkpoints, without their last line: the checksum is made right here.
#include "shard/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "engine/io/xxh3.h"
#include "shard/checkpoint/reader.h"
#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {
namespace {

/// Reads all of a checkpoint with files of zeros. Throws where their checksums are others.
void read_all(const shard::Manifest& manifest, std::string_view text) {
  constexpr std::int64_t kMaxNbytes = 1 << 16;
  static const testing::TempFolder folder;
  if (manifest.files.size() > 4) return;
  for (const shard::CheckpointFile& file : manifest.files) {
    // Names of files are those of the folder alone.
    if (file.nbytes > kMaxNbytes || file.name == shard::kManifestName) return;
    if (file.name.size() > 200) return;
    folder.write(file.name, std::string(static_cast<std::size_t>(file.nbytes), '\0'));
  }
  folder.write(shard::kManifestName, text);
  shard::CheckpointReader reader(folder.path());
  for (const shard::CheckpointTensor& tensor : reader.manifest().tensors) {
    reader.read_bytes(tensor);
    if (tensor.dtype != engine::DType::kF32) continue;
    std::vector<float> values(static_cast<std::size_t>(tensor.numel()));
    reader.read(tensor, 0, values);
  }
}

}  // namespace

const char* const kTarget = "manifest";

void consume(std::string_view input) {
  std::string text(input);
  text += fmt::format("\"xxh3\": \"{:016x}\"\n}}\n", engine::xxh3(std::as_bytes(std::span(input))));
  const shard::Manifest manifest = shard::parse_manifest(text, "input");
  const std::string written = shard::to_text(manifest);
  const shard::Manifest again = shard::parse_manifest(written, "again");
  promise(shard::to_text(again) == written, "expected the same manifest again");
  promise(again.values == manifest.values, "expected the same values again");
  manifest.check_complete("input");
  for (const shard::CheckpointTensor& tensor : manifest.tensors) {
    for (const shard::CheckpointRange& range : tensor.ranges) {
      const shard::CheckpointFile& file = manifest.files.at(range.file);
      const std::int64_t nbytes = range.numel * engine::size_of(tensor.dtype);
      promise(range.offset >= file.header_nbytes && range.offset + nbytes <= file.nbytes,
              "expected ranges inside their files");
    }
  }
  read_all(manifest, text);
}

}  // namespace tessera::fuzz
