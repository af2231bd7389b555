#include "shard/checkpoint/writer.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "engine/io/xxh3.h"

namespace tessera::shard {

using engine::IoError;
using engine::require;

namespace {

std::string reason(int error) { return std::generic_category().message(error); }

bool is_of_model(const CheckpointPiece& piece) {
  return piece.kind == "parameter" || piece.kind == "buffer";
}

engine::TensorSpec spec_of(const CheckpointPiece& piece) {
  std::string name =
      piece.kind == "parameter" ? piece.name : fmt::format("{}/{}", piece.kind, piece.name);
  if (piece.num_parts > 1) name += fmt::format("/{}", piece.part);
  const std::int64_t numel = piece.values.numel();
  if (numel == engine::numel(piece.shape)) return {name, piece.shape, piece.values.dtype()};
  return {fmt::format("{}[{}:{}]", name, piece.begin, piece.begin + numel),
          {numel},
          piece.values.dtype()};
}

/// A new file, and the checksum of what was written to it.
class ShardFile {
 public:
  explicit ShardFile(std::string path)
      : path_(std::move(path)),
        file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    require<IoError>(file_.is_open(), "[checkpoint] expected to create a file, got {} ({})",
                     reason(errno), path_);
  }

  std::int64_t nbytes() const { return nbytes_; }
  std::uint64_t xxh3() const { return xxh3_.value(); }
  void write(std::span<const std::byte> bytes) {
    xxh3_.update(bytes);
    engine::write_all(file_, path_, bytes);
    nbytes_ += std::ssize(bytes);
  }
  void close() {
    int error = engine::flush(file_);
    const int close_error = file_.close();
    if (error == 0) error = close_error;
    require<IoError>(error == 0, "[checkpoint] expected to flush the file, got {} ({})",
                     reason(error), path_);
  }

 private:
  std::string path_;
  engine::FileDescriptor file_;
  engine::Xxh3 xxh3_;
  std::int64_t nbytes_ = 0;
};

/// Writes the elements of `t`, and returns the checksums of its chunks.
std::vector<std::uint64_t> write_values(ShardFile& file, const SplitTensor& t) {
  std::vector<std::uint64_t> checksums;
  for (std::int64_t begin = 0; begin < t.numel(); begin += kChunkNumel) {
    const SplitTensor chunk = t.slice(begin, std::min(kChunkNumel, t.numel() - begin));
    engine::Xxh3 checksum;
    for (const engine::Tensor* part : {&chunk.device(), &chunk.host()}) {
      if (!part->defined() || part->numel() == 0) continue;
      require(part->device().is_host(), "[checkpoint] expected memory of the host ({})",
              part->name());
      const std::span bytes(part->raw(), static_cast<std::size_t>(part->nbytes()));
      checksum.update(bytes);
      file.write(bytes);
    }
    checksums.push_back(checksum.value());
  }
  return checksums;
}

void write_file(Manifest& manifest, const std::string& folder, const std::string& name,
                const CheckpointOrigin& origin, const std::vector<const CheckpointPiece*>& pieces) {
  if (pieces.empty()) return;
  ShardFile file(fmt::format("{}/{}", folder, name));
  std::vector<engine::TensorSpec> specs;
  for (const CheckpointPiece* piece : pieces) specs.push_back(spec_of(*piece));
  const std::string prefix =
      engine::safetensors_prefix(specs,
                                 {{"format", "pt"},
                                  {"tessera.run", origin.run},
                                  {"tessera.step", std::to_string(origin.step)}},
                                 name);
  const std::span header = std::as_bytes(std::span(prefix));
  file.write(header);
  const std::size_t number = manifest.files.size();
  for (const CheckpointPiece* piece : pieces) {
    CheckpointRange range{.file = number,
                          .offset = file.nbytes(),
                          .begin = piece->begin,
                          .numel = piece->values.numel()};
    range.xxh3 = write_values(file, piece->values);
    manifest.tensors.push_back({.kind = piece->kind,
                                .name = piece->name,
                                .part = piece->part,
                                .num_parts = piece->num_parts,
                                .dtype = piece->values.dtype(),
                                .shape = piece->shape,
                                .ranges = {std::move(range)}});
  }
  manifest.files.push_back({.name = name,
                            .nbytes = file.nbytes(),
                            .header_nbytes = std::ssize(header),
                            .header_xxh3 = engine::xxh3(header),
                            .xxh3 = file.xxh3()});
  file.close();
}

}  // namespace

Manifest write_pieces(const std::string& folder, const CheckpointOrigin& origin,
                      std::span<const CheckpointPiece> pieces) {
  const int error = ::mkdir(folder.c_str(), 0777) == 0 || errno == EEXIST ? 0 : errno;
  require<IoError>(error == 0, "[checkpoint] expected to make a folder, got {} ({})", reason(error),
                   folder);
  std::vector<const CheckpointPiece*> model, state;
  for (const CheckpointPiece& piece : pieces) {
    (is_of_model(piece) ? model : state).push_back(&piece);
  }
  const std::string ending =
      fmt::format("{:05}-of-{:05}.safetensors", origin.rank, origin.num_ranks);
  Manifest manifest;
  manifest.step = origin.step;
  manifest.run = origin.run;
  write_file(manifest, folder, "model-" + ending, origin, model);
  write_file(manifest, folder, "state-" + ending, origin, state);
  return manifest;
}

}  // namespace tessera::shard
