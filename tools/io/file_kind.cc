#include "tools/io/file_kind.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <span>

#include "engine/io/file.h"

namespace tessera::tools {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kUnpack = "unpack it";
constexpr std::string_view kTextOfIt =
    "write its text to a plain text file, or for a model with a tokenizer its ids to a .bin file "
    "by "
    "`bazel run //tools:tokenize`";
constexpr std::string_view kNoWeights =
    "put the model's safetensors file there: save_pretrained() of transformers writes one";
constexpr std::string_view kFetch = "fetch the file that it stands for: `git lfs pull`";
constexpr std::string_view kDownload =
    "download the file itself: on Hugging Face its address has /resolve/ in place of /blob/";
constexpr std::string_view kTorchAsData =
    "write token ids as 16-bit numbers: ids.numpy().astype('uint16').tofile('tokens.bin')";
constexpr std::string_view kTorchAsWeights =
    "convert it: `safetensors.torch.save_model(model, \"model.safetensors\")`, or "
    "save_pretrained() of transformers";
constexpr std::string_view kNumpyAsData =
    "write token ids as 16-bit numbers: numpy.load(...).astype('uint16').tofile('tokens.bin')";

struct Magic {
  std::size_t at;  // where the bytes stand
  std::string_view bytes;
  FileKind kind;
};

constexpr FileKind kHtml{"an HTML page", kDownload, kDownload, false, false, /*is_page=*/true};
constexpr FileKind kTorch{"a PyTorch file (a zip archive with a pickle)", kTorchAsData,
                          kTorchAsWeights};
constexpr FileKind kPickle{"a Python pickle, as older versions of PyTorch save", kTorchAsData,
                           kTorchAsWeights};
constexpr FileKind kNpz{"a NumPy .npz archive", kNumpyAsData, kNoWeights};
constexpr FileKind kZip{"a zip archive", kUnpack, kUnpack};
constexpr FileKind kJson{"JSON", kTextOfIt, kNoWeights, /*is_json=*/true};
constexpr FileKind kSafetensors{"a safetensors file, which holds weights",
                                "give its folder as --init.from, and text or tokens here", "",
                                false,
                                /*is_safetensors=*/true};

constexpr Magic kMagics[] = {
    {0, "version https://git-lfs"sv, {"a git-lfs pointer", kFetch, kFetch}},
    {0, "\x1f\x8b\x08"sv, {"a gzip file", "unpack it: gunzip", "unpack it: gunzip"}},
    {0, "\x28\xb5\x2f\xfd"sv, {"a zstd file", "unpack it: unzstd", "unpack it: unzstd"}},
    {0, "\xfd\x37zXZ\0"sv, {"an xz file", "unpack it: unxz", "unpack it: unxz"}},
    {0, "\x04\x22\x4d\x18"sv, {"an lz4 file", "unpack it: unlz4", "unpack it: unlz4"}},
    {0, "7z\xbc\xaf\x27\x1c"sv, {"a 7z archive", kUnpack, kUnpack}},
    {0, "Rar!\x1a\x07"sv, {"a RAR archive", kUnpack, kUnpack}},
    {257, "ustar"sv, {"a tar archive", "unpack it: tar xf", "unpack it: tar xf"}},
    {0, "\x93NUMPY"sv, {"a NumPy .npy file", kNumpyAsData, kNoWeights}},
    {0,
     "PAR1"sv,
     {"a Parquet file", "write its text column to a plain text file, for one with pandas",
      kNoWeights}},
    {0, "ARROW1"sv, {"an Arrow file", kTextOfIt, kNoWeights}},
    {0, "\x89HDF\r\n\x1a\n"sv, {"an HDF5 file", kTextOfIt, kNoWeights}},
    {0, "SQLite format 3"sv, {"an SQLite database", kTextOfIt, kNoWeights}},
    {0, "GGUF"sv, {"a GGUF file of llama.cpp", kTextOfIt, kNoWeights}},
    {0, "%PDF-"sv, {"a PDF file", kTextOfIt, kNoWeights}},
    {0,
     "\x7f"
     "ELF"sv,
     {"a program", kTextOfIt, kNoWeights}},
    {0, "\x89PNG\r\n"sv, {"a PNG image", kTextOfIt, kNoWeights}},
};

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// `text` from the first of its bytes that is no blank, nor part of a byte order mark.
std::string_view after_blanks(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first == std::string_view::npos ? "" : text.substr(first);
}

bool is_html(std::string_view text) {
  std::string lower(text.substr(0, 16));
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower.starts_with("<!doctype html") || lower.starts_with("<html");
}

// An object with a key, or a list of such.
bool is_json(std::string_view text) {
  if (text.starts_with('[')) text = after_blanks(text.substr(1));
  return text.starts_with('{') && after_blanks(text.substr(1)).starts_with('"');
}

bool is_safetensors(std::string_view head) {
  std::uint64_t length = 0;
  if (head.size() < 10) return false;
  std::memcpy(&length, head.data(), sizeof length);
  return length >= 2 && length < (1u << 27) && head.substr(8).starts_with("{\"");
}

// Of the first entry of a zip archive, whose name stands in the head.
const FileKind* kind_of_zip(std::string_view head) {
  if (has(head, "data.pkl") || has(head, ".format_version")) return &kTorch;
  return has(head, ".npy") ? &kNpz : &kZip;
}

}  // namespace

std::string FileKind::to_unpack() const {
  // What helps for data and for weights alike does so for any file.
  return as_data == as_weights ? fmt::format(": {}", as_data) : "";
}

const FileKind* file_kind(std::string_view head) {
  for (const Magic& magic : kMagics) {
    if (head.size() >= magic.at && head.substr(magic.at).starts_with(magic.bytes)) {
      return &magic.kind;
    }
  }
  if (head.starts_with("PK\x03\x04")) return kind_of_zip(head);
  // bzip2: a digit for the size of blocks, then the digits of pi.
  static constexpr FileKind kBzip2{"a bzip2 file", "unpack it: bunzip2", "unpack it: bunzip2"};
  if (head.starts_with("BZh") && has(head.substr(0, 10), "1AY&SY")) return &kBzip2;
  // A pickle's protocol, and the first thing in it: a frame, PyTorch's number, or a container.
  const bool is_pickle = head.size() > 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5 &&
                         has("\x8a\x95}](c"sv, head.substr(2, 1));
  if (is_pickle) return &kPickle;
  if (is_safetensors(head)) return &kSafetensors;
  const std::string_view text = after_blanks(head);
  if (is_html(text)) return &kHtml;
  return is_json(text) ? &kJson : nullptr;
}

const FileKind* kind_of_file(const std::string& path) {
  const engine::InputFile file(path);
  std::string head(std::min(kFileKindNbytes, static_cast<std::size_t>(file.nbytes())), '\0');
  file.read(0, std::as_writable_bytes(std::span(head)));
  return file_kind(head);
}

}  // namespace tessera::tools
