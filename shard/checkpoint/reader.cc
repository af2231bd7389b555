#include "shard/checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/dtype.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "engine/io/xxh3.h"

namespace tessera::shard {

using engine::excerpt;
using engine::IoError;
using engine::require;

namespace {

// Read and added to a checksum while it is in the cache.
constexpr std::size_t kPieceNbytes = std::size_t{1} << 18;

std::int64_t chunk_numel(const CheckpointRange& range, std::size_t chunk) {
  return std::min(kChunkNumel, range.numel - static_cast<std::int64_t>(chunk) * kChunkNumel);
}

}  // namespace

CheckpointReader::CheckpointReader(std::string folder) : folder_(std::move(folder)) {
  const std::string path = fmt::format("{}/{}", folder_, kManifestName);
  const std::string text = engine::read_text_file(path, kMaxManifestNbytes);
  manifest_ = parse_manifest(text, path);
  manifest_.check_complete(path);
  manifest_xxh3_ = engine::xxh3(std::as_bytes(std::span(text)));
  for (const CheckpointFile& file : manifest_.files) {
    const engine::InputFile there(path_of(file));
    require<IoError>(there.nbytes() == file.nbytes,
                     "[checkpoint] expected a file of {} bytes, got {} ({})", file.nbytes,
                     there.nbytes(), there.path());
  }
  for (const CheckpointTensor& t : manifest_.tensors) tensors_[{t.kind, t.name, t.part}] = &t;
}

std::string CheckpointReader::path_of(const CheckpointFile& file) const {
  return fmt::format("{}/{}", folder_, file.name);
}

const engine::InputFile& CheckpointReader::open(std::size_t file) {
  const auto at = std::ranges::find(files_, file, &OpenFile::number);
  if (at != files_.end()) return at->file;
  if (files_.size() == kMaxOpen) files_.pop_front();
  files_.push_back({file, engine::InputFile(path_of(manifest_.files[file]))});
  return files_.back().file;
}

const CheckpointTensor* CheckpointReader::find(std::string_view kind, std::string_view name,
                                               int part) const {
  const auto found = tensors_.find({kind, name, part});
  return found == tensors_.end() ? nullptr : found->second;
}

void CheckpointReader::check_header(std::size_t file) const {
  const CheckpointFile& f = manifest_.files[file];
  std::vector<std::byte> header(static_cast<std::size_t>(f.header_nbytes));
  const engine::InputFile input(path_of(f));
  input.read(0, header);
  require<IoError>(engine::xxh3(header) == f.header_xxh3,
                   "[checkpoint] expected the header that was written, got a damaged one ({})",
                   input.path());
}

void CheckpointReader::read_chunk(const CheckpointTensor& tensor, const CheckpointRange& range,
                                  std::size_t chunk, std::span<std::byte> to) {
  const std::int64_t first = static_cast<std::int64_t>(chunk) * kChunkNumel;
  const std::int64_t size = size_of(tensor.dtype);
  const engine::InputFile& file = open(range.file);
  engine::Xxh3 checksum;
  for (std::size_t at = 0; at < to.size(); at += kPieceNbytes) {
    const auto piece = to.subspan(at, std::min(kPieceNbytes, to.size() - at));
    file.read(range.offset + first * size + static_cast<std::int64_t>(at), piece);
    checksum.update(piece);
  }
  require<IoError>(checksum.value() == range.xxh3[chunk],
                   "[checkpoint] expected the bytes that were written, got damaged ones (elements "
                   "{} to {} of {} {}, {})",
                   range.begin + first, range.begin + first + std::ssize(to) / size,
                   excerpt(tensor.kind), excerpt(tensor.name), file.path());
}

void CheckpointReader::read(const CheckpointTensor& tensor, std::int64_t begin,
                            std::span<float> out) {
  const std::int64_t end = begin + std::ssize(out);
  require(begin >= 0 && end <= tensor.numel(),
          "[checkpoint] expected elements of {}, got [{}, {}) ({} {})", tensor.numel(), begin, end,
          tensor.kind, tensor.name);
  // The first range that ends after `begin`: ranges are sorted and cover everything.
  auto range = std::ranges::upper_bound(tensor.ranges, begin, {},
                                        [](const CheckpointRange& r) { return r.begin + r.numel; });
  for (; begin < end; ++range) {
    if (range->numel == 0) continue;
    const std::int64_t range_end = std::min(end, range->begin + range->numel);
    while (begin < range_end) {
      const auto chunk = static_cast<std::size_t>((begin - range->begin) / kChunkNumel);
      const std::int64_t chunk_begin =
          range->begin + static_cast<std::int64_t>(chunk) * kChunkNumel;
      const std::int64_t n = std::min(range_end, chunk_begin + kChunkNumel) - begin;
      const std::span<float> part = out.first(static_cast<std::size_t>(n));
      if (tensor.dtype == engine::DType::kF32 && n == chunk_numel(*range, chunk)) {
        read_chunk(tensor, *range, chunk, std::as_writable_bytes(part));
      } else {
        chunk_.resize(static_cast<std::size_t>(chunk_numel(*range, chunk) * size_of(tensor.dtype)));
        read_chunk(tensor, *range, chunk, chunk_);
        engine::dispatch_float(tensor.dtype, "checkpoint", [&](auto zero) {
          using T = decltype(zero);
          const auto* stored = reinterpret_cast<const T*>(chunk_.data()) + (begin - chunk_begin);
          engine::cast(part.data(), stored, n);
        });
      }
      out = out.subspan(static_cast<std::size_t>(n));
      begin += n;
    }
  }
}

std::vector<std::byte> CheckpointReader::read_bytes(const CheckpointTensor& tensor) {
  std::vector<std::byte> bytes;
  for (const CheckpointRange& range : tensor.ranges) {
    for (std::size_t chunk = 0; chunk < range.xxh3.size(); ++chunk) {
      const auto nbytes =
          static_cast<std::size_t>(chunk_numel(range, chunk) * size_of(tensor.dtype));
      bytes.resize(bytes.size() + nbytes);
      read_chunk(tensor, range, chunk, std::span(bytes).last(nbytes));
    }
  }
  return bytes;
}

}  // namespace tessera::shard
