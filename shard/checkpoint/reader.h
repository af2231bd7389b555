// A checkpoint open for reading: nothing is believed before its checksum is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "engine/io/file.h"
#include "shard/checkpoint/manifest.h"

namespace tessera::shard {

/// The bytes of manifest.json at most.
inline constexpr std::int64_t kMaxManifestNbytes = std::int64_t{1} << 30;

class CheckpointReader {
 public:
  /// Reads and checks the manifest, and that every file is there with its size. Throws IoError
  /// naming the file.
  explicit CheckpointReader(std::string folder);
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  /// Of the manifest's text: readers that agree on it read the same checkpoint.
  std::uint64_t manifest_xxh3() const { return manifest_xxh3_; }

  /// Null if there is none.
  const CheckpointTensor* find(std::string_view kind, std::string_view name, int part = 0) const;
  /// Throws IoError naming the file if its header is not what was written.
  void check_header(std::size_t file) const;
  /// Elements [begin, begin + out.size()) of a tensor of this manifest, f32 or bf16, as f32. Reads,
  /// and checks, the chunks that they lie in. Throws IoError naming tensor and file if one is
  /// damaged, InvalidArgument for elements or a dtype that it cannot read. Not thread-safe.
  void read(const CheckpointTensor& tensor, std::int64_t begin, std::span<float> out);
  /// All bytes of a tensor of any dtype, as they are. Throws as read().
  std::vector<std::byte> read_bytes(const CheckpointTensor& tensor);

 private:
  // Ranks that are threads share what a process may have open.
  static constexpr std::size_t kMaxOpen = 4;
  struct OpenFile {
    std::size_t number;
    engine::InputFile file;
  };

  std::string path_of(const CheckpointFile& file) const;
  const engine::InputFile& open(std::size_t file);
  void read_chunk(const CheckpointTensor& tensor, const CheckpointRange& range, std::size_t chunk,
                  std::span<std::byte> to);

  std::string folder_;
  Manifest manifest_;
  std::uint64_t manifest_xxh3_ = 0;
  std::deque<OpenFile> files_;  // those that were read last
  std::map<std::tuple<std::string_view, std::string_view, int>, const CheckpointTensor*> tensors_;
  std::vector<std::byte> chunk_;  // that was read last
};

}  // namespace tessera::shard
