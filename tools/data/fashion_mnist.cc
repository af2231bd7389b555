#include "tools/data/fashion_mnist.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;

constexpr std::int64_t kMaxImages = 1 << 24;
constexpr std::int64_t kMaxSide = 4096;
constexpr std::size_t kChunk = 1 << 20;

/// An IDX file of bytes, compressed or not (zlib passes plain files through).
class IdxFile {
 public:
  /// `num_dims` of 1 or 3: the last byte of the magic.
  IdxFile(const std::string& folder, const std::string& name, std::uint32_t num_dims)
      : path_(existing(folder, name)), file_(gzopen(path_.c_str(), "rb"), gzclose) {
    require<IoError>(file_ != nullptr, "[idx] expected a readable file, got none ({})", path_);
    // zlib passes through what gzip has not made.
    const FileKind* kind = kind_of_file(path_);
    const bool is_other = kind != nullptr && kind->name != "a gzip file";
    require<IoError>(!is_other,
                     "[idx] expected images or labels in the IDX format, got {}: {} ({})",
                     is_other ? kind->name : "", is_other ? kind->as_data : "", path_);
    const std::uint32_t magic = read_word();
    require<IoError>(magic == (0x800u | num_dims), "[idx] expected magic {:#x}, got {:#x} ({})",
                     0x800u | num_dims, magic, path_);
    for (std::uint32_t i = 0; i < num_dims; ++i) {
      const std::int64_t max = i == 0 ? kMaxImages : kMaxSide;
      dims_[i] = read_word();
      require<IoError>(dims_[i] >= 1 && dims_[i] <= max,
                       "[idx] expected dimension {} in [1, {}], got {} ({})", i, max, dims_[i],
                       path_);
    }
  }

  const std::string& path() const { return path_; }
  const std::array<std::int64_t, 3>& dims() const { return dims_; }  // 1 where there is none

  /// The bytes after the header, which must be all there is. Memory grows with what arrives: a
  /// header cannot claim it.
  std::vector<std::uint8_t> read_bytes() {
    const auto nbytes = static_cast<std::size_t>(dims_[0] * dims_[1] * dims_[2]);
    std::vector<std::uint8_t> bytes;
    while (bytes.size() < nbytes) {
      const std::size_t at = bytes.size(), n = std::min(kChunk, nbytes - at);
      bytes.resize(at + n);
      read(std::span(bytes).subspan(at));
    }
    std::uint8_t extra = 0;
    require<IoError>(read_some(std::span(&extra, 1)) == 0,
                     "[idx] expected {} bytes after the header, got more ({})", nbytes, path_);
    return bytes;
  }

 private:
  static std::string existing(const std::string& folder, const std::string& name) {
    const std::string plain = folder + "/" + name;
    for (const auto& path : {plain, plain + ".gz"}) {
      std::error_code ignored;
      if (std::filesystem::exists(path, ignored)) return engine::InputFile(path).path();
    }
    fail<IoError>("[idx] expected this file or the same with .gz, got neither ({})", plain);
  }

  std::size_t read_some(std::span<std::uint8_t> out) {
    const int got = gzread(file_.get(), out.data(), static_cast<unsigned>(out.size()));
    int error = Z_OK;
    const char* text = gzerror(file_.get(), &error);
    require<IoError>(got >= 0 && error == Z_OK, "[idx] expected sound data, got {} ({})", text,
                     path_);
    return static_cast<std::size_t>(got);
  }

  void read(std::span<std::uint8_t> out) {
    const std::size_t got = read_some(out);
    require<IoError>(got == out.size(), "[idx] expected {} more bytes, got {} ({})", out.size(),
                     got, path_);
  }

  std::uint32_t read_word() {
    std::array<std::uint8_t, 4> bytes{};
    read(bytes);
    return static_cast<std::uint32_t>(bytes[0]) << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
  }

  std::string path_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  std::array<std::int64_t, 3> dims_{1, 1, 1};
};

ImageSet load(const std::string& folder, const std::string& part) {
  IdxFile images(folder, part + "-images-idx3-ubyte", 3);
  IdxFile labels(folder, part + "-labels-idx1-ubyte", 1);
  const auto [num_images, height, width] = images.dims();
  require<IoError>(labels.dims()[0] == num_images,
                   "[fashion_mnist] expected {} labels, one for each image, got {} ({})",
                   num_images, labels.dims()[0], labels.path());
  ImageSet set{num_images, height, width, images.read_bytes(), labels.read_bytes()};
  const auto bad = std::ranges::find_if(set.labels, [](std::uint8_t label) { return label >= 10; });
  require<IoError>(bad == set.labels.end(),
                   "[fashion_mnist] expected labels below 10, got {} at position {} ({})",
                   bad == set.labels.end() ? 0 : *bad, bad - set.labels.begin(), labels.path());
  return set;
}

}  // namespace

FashionMnist load_fashion_mnist(const std::string& folder) {
  FashionMnist data{load(folder, "train"), load(folder, "t10k")};
  require<IoError>(
      data.train.height == data.test.height && data.train.width == data.test.width,
      "[fashion_mnist] expected test images of {} x {} as in training, got {} x {} ({})",
      data.train.height, data.train.width, data.test.height, data.test.width, folder);
  return data;
}

}  // namespace tessera::tools
