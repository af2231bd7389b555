// What a checkpoint holds: a folder of safetensors files, and manifest.json, which says where in
// them each tensor lies and what the checksums of its bytes are.
//
// Tensors are cut into ranges of elements, as the ranks that wrote them had them; a reader looks up
// the ranges that it needs, whatever its own ranks are. Every byte of every file is covered once:
// by the checksum of the file's header, or by that of a chunk of a range.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/dtype.h"

namespace tessera::shard {

/// The version that is written; later ones are refused by name. All end in their checksum alike.
inline constexpr std::int64_t kCheckpointVersion = 1;
/// Elements that share a checksum, and that a reader reads at a time.
inline constexpr std::int64_t kChunkNumel = std::int64_t{1} << 20;
inline constexpr const char* kManifestName = "manifest.json";

struct CheckpointFile {
  std::string name;  ///< in the folder
  std::int64_t nbytes = 0;
  std::int64_t header_nbytes = 0;  ///< of the safetensors header, its length included
  std::uint64_t header_xxh3 = 0;
  std::uint64_t xxh3 = 0;  ///< of the whole file
};

/// Elements [begin, begin + numel) of a tensor, in one file.
struct CheckpointRange {
  std::size_t file = 0;
  std::int64_t offset = 0;  ///< bytes, from the start of the file
  std::int64_t begin = 0;
  std::int64_t numel = 0;
  std::vector<std::uint64_t> xxh3 = {};  ///< of every kChunkNumel elements
};

struct CheckpointTensor {
  /// "parameter", "buffer", "optimizer.NAME" for a state of that name, "ema", or HOOK.TENSOR for
  /// what a communication hook remembers.
  std::string kind;
  std::string name;  ///< of the parameter or buffer, or of a unit
  /// Of what differs between ranks: whose of `num_parts`.
  int part = 0, num_parts = 1;
  engine::DType dtype = engine::DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<CheckpointRange> ranges;  ///< by `begin`; together all elements, each once

  std::int64_t numel() const;
};

struct CheckpointGroup {
  std::string name;
  double lr_scale = 1;
  double weight_decay = 0;
};

struct CheckpointOptimizer {
  std::int64_t num_steps = 0;
  std::vector<CheckpointGroup> groups;
};

struct Manifest {
  std::int64_t step = 0;
  std::string run;   ///< 32 hex digits, the same in all checkpoints of a run
  int ranks = 1;     ///< that wrote it
  std::string plan;  ///< hash of theirs: what they gathered and reduced
  /// What the program that trains wants back: data position, seeds, configuration.
  std::map<std::string, std::string> values;
  /// Of each CheckpointPart: those that it has, or an empty one.
  std::vector<CheckpointOptimizer> optimizers;
  std::vector<CheckpointFile> files;
  std::vector<CheckpointTensor> tensors;

  /// Takes files and tensors of another rank's part. Ranges that are there already stay. Throws
  /// IoError naming the tensor if they hold other values, or it has another shape or dtype.
  void add(Manifest part);
  /// Throws IoError naming `path` and the tensor unless every element of every tensor is there
  /// once, in bytes that nothing else is in.
  void check_complete(std::string_view path) const;
};

/// JSON, which ends in its own checksum.
std::string to_text(const Manifest& manifest);
/// Reads what to_text() writes. Throws IoError naming `path` and what is wrong: damaged, malformed,
/// ranges out of their tensor, chunks without a checksum, a name with a slash; and InvalidArgument
/// for what a newer version wrote.
Manifest parse_manifest(std::string_view text, std::string_view path);

}  // namespace tessera::shard
