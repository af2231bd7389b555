#include "engine/io/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"

namespace tessera::engine {
namespace {

/* [Note: safetensors rules]
   A file is refused unless all of this holds; the rules are the format's own, and stricter where it
   leaves a choice, since a file that two readers understand differently is a way in.
   - The header is at most 100 MB, lies inside the file, begins with '{' and ends with '}' and
     spaces. It is strict JSON in strict UTF-8, without NUL, raw or escaped.
   - No key comes twice, at any level. A tensor has dtype, shape and data_offsets, and nothing else.
     __metadata__ maps strings to strings. So nothing nests deeper than an array in an entry.
   - Shapes and offsets are plain integers, 0 .. 2^63 - 1. The product of the dimensions does not
     overflow, not even where a zero would hide that.
   - A tensor's bytes are as many as its shape and dtype say. All tensors together cover the bytes
     after the header exactly: no gap, no overlap, nothing after them.
   - At most kMaxEntries tensors of at most kMaxDims dimensions, and as much metadata: a hostile
   header then costs time and memory in proportion to its length.

   Names are keys and never paths. Values are not looked at: NaN loads. */

constexpr std::size_t kMaxEntries = 1 << 18;
constexpr std::size_t kMaxDims = 64;
constexpr std::string_view kMetadata = "__metadata__";

/// Bytes of one element; 0 for a dtype we do not know.
std::int64_t dtype_nbytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, std::int64_t> kDTypes[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},
      {"I32", 4},  {"F32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8},
  };
  for (const auto& [name, nbytes] : kDTypes) {
    if (name == dtype) return nbytes;
  }
  return 0;
}

/// Receives the events of the JSON parser, which does not recurse, and checks each as it comes.
class HeaderReader {
 public:
  HeaderReader(std::int64_t buffer_nbytes, std::string_view path)
      : buffer_nbytes_(buffer_nbytes), path_(path) {}

  SafetensorsHeader take() && { return std::move(header_); }

  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("a boolean"); }
  bool number_float(double, const std::string& text) { unexpected("the number " + excerpt(text)); }
  bool number_integer(std::int64_t value) { unexpected("the number " + std::to_string(value)); }
  bool binary(std::vector<std::uint8_t>&) { unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    auto* list =
        place_ == Place::kShape ? &entry_.shape : (place_ == Place::kOffsets ? &offsets_ : nullptr);
    if (list == nullptr || !std::in_range<std::int64_t>(value)) {
      unexpected("the number " + std::to_string(value));
    }
    const std::size_t max = place_ == Place::kShape ? kMaxDims : 2;
    if (list->size() == max) unexpected("more than " + std::to_string(max) + " numbers");
    list->push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = std::move(value);
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      entry_.dtype = std::move(value);
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kRoot;
    } else if (place_ == Place::kRoot) {
      place_ = key_ == kMetadata ? Place::kMetadata : Place::kTensor;
      fields_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    require<IoError>(value.find('\0') == std::string::npos,
                     "[safetensors] expected names without NUL, got {} ({})", shown_name(value),
                     path_);
    if (place_ == Place::kRoot) {
      begin_entry(std::move(value));
      return true;
    }
    bool is_new = false;
    if (place_ == Place::kMetadata) {
      if (header_.metadata.size() == kMaxEntries) unexpected("too many");
      is_new = header_.metadata.emplace(value, "").second;
    } else {
      if (value != "dtype" && value != "shape" && value != "data_offsets") {
        unexpected("the field " + shown_name(value));
      }
      is_new = fields_.insert(value).second;
    }
    if (!is_new) unexpected(shown_name(value) + " twice");
    key_ = std::move(value);
    return true;
  }

  bool end_object() {
    if (place_ == Place::kTensor) finish_entry();
    place_ = Place::kRoot;  // the parser itself refuses text after the outermost object
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::kTensor || key_ == "dtype") unexpected("an array");
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    return true;
  }

  bool end_array() {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) {
    fail<IoError>("[safetensors] expected a JSON header, got an error at byte {}: {} ({})",
                  position, excerpt(error.what(), 400), path_);
  }

 private:
  enum class Place { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets };

  [[noreturn]] void unexpected(const std::string& what) const {
    const char* expected = "an object of tensors";
    if (place_ == Place::kRoot) expected = "an object";
    if (place_ == Place::kMetadata) expected = "strings under distinct keys";
    if (place_ == Place::kTensor) expected = "dtype, shape and data_offsets, once each";
    if (place_ == Place::kShape) expected = "a shape of integers in [0, 2^63)";
    if (place_ == Place::kOffsets) expected = "two offsets, integers in [0, 2^63)";
    fail<IoError>("[safetensors] expected {}, got {} (tensor {}, {})", expected, what,
                  shown_name(entry_.name), path_);
  }

  void begin_entry(std::string name) {
    key_ = std::move(name);
    entry_ = TensorInfo{.name = key_, .dtype = {}, .shape = {}};
    offsets_.clear();
    if (key_ == kMetadata) {
      require<IoError>(!has_metadata_, "[safetensors] expected one {}, got a second ({})",
                       kMetadata, path_);
      has_metadata_ = true;
      return;
    }
    require<IoError>(header_.tensors.size() < kMaxEntries,
                     "[safetensors] expected at most {} tensors, got more ({})", kMaxEntries,
                     path_);
  }

  /// Checks a tensor by itself; how tensors lie next to each other is checked at the end.
  void finish_entry() {
    const std::string name = shown_name(entry_.name);
    require<IoError>(fields_.size() == 3,
                     "[safetensors] expected dtype, shape and data_offsets, got {} of them (tensor "
                     "{}, {})",
                     fields_.size(), name, path_);
    std::int64_t nbytes = dtype_nbytes(entry_.dtype);
    require<IoError>(nbytes != 0, "[safetensors] expected a known dtype, got {} (tensor {}, {})",
                     shown_name(entry_.dtype), name, path_);
    bool overflow = false;
    for (const std::int64_t dim : entry_.shape) {
      overflow |= __builtin_mul_overflow(nbytes, std::max<std::int64_t>(dim, 1), &nbytes);
    }
    if (std::ranges::count(entry_.shape, 0) > 0) nbytes = 0;
    require<IoError>(!overflow,
                     "[safetensors] expected under 2^63 bytes, got shape {} (tensor {}, {})",
                     to_string(entry_.shape), name, path_);
    require<IoError>(offsets_.size() == 2 && offsets_[0] <= offsets_[1],
                     "[safetensors] expected offsets begin <= end, got {} (tensor {}, {})",
                     to_string(offsets_), name, path_);
    require<IoError>(offsets_[1] <= buffer_nbytes_,
                     "[safetensors] expected offsets inside {} bytes, got {}: the file was cut "
                     "short, or its header is wrong (tensor {}, {})",
                     buffer_nbytes_, to_string(offsets_), name, path_);
    require<IoError>(
        offsets_[1] - offsets_[0] == nbytes,
        "[safetensors] expected {} bytes for shape {} of {}, got offsets {} (tensor {}, {})",
        nbytes, to_string(entry_.shape), entry_.dtype, to_string(offsets_), name, path_);
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    header_.tensors.push_back(std::move(entry_));
  }

  std::int64_t buffer_nbytes_;
  std::string_view path_;
  Place place_ = Place::kStart;
  std::string key_;
  std::set<std::string> fields_;  // of the open entry
  TensorInfo entry_;
  std::vector<std::int64_t> offsets_;
  bool has_metadata_ = false;
  SafetensorsHeader header_;
};

}  // namespace

std::int64_t numel(std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  for (const std::int64_t dim : shape) product *= dim;
  return product;
}

std::string to_string(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (const std::int64_t dim : shape) text += (text.size() == 1 ? "" : ", ") + std::to_string(dim);
  return text + ")";
}

std::string shown_name(std::string_view name) {
  constexpr std::size_t kMax = 120;
  return json_literal(name.substr(0, kMax)) + (name.size() > kMax ? "..." : "");
}

SafetensorsHeader parse_safetensors_header(std::string_view json, std::int64_t buffer_nbytes,
                                           std::string_view path) {
  const auto last = json.find_last_not_of(' ');
  require<IoError>(
      json.starts_with('{') && json[last] == '}',
      "[safetensors] expected a header from '{{' to '}}' and spaces, got otherwise ({})", path);
  // The parser takes a NUL for the end of the text.
  require<IoError>(json.find('\0') == std::string_view::npos,
                   "[safetensors] expected a header without NUL bytes, got one ({})", path);
  HeaderReader reader(buffer_nbytes, path);
  nlohmann::json::sax_parse(json.substr(0, last + 1), &reader);
  SafetensorsHeader header = std::move(reader).take();

  std::unordered_set<std::string_view> names;
  for (const TensorInfo& tensor : header.tensors) {
    require<IoError>(names.insert(tensor.name).second,
                     "[safetensors] expected each tensor once, got two (tensor {}, {})",
                     shown_name(tensor.name), path);
  }
  // Empty tensors share their place with the next one and go first.
  std::ranges::sort(header.tensors, [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t end = 0;
  for (const TensorInfo& tensor : header.tensors) {
    require<IoError>(
        tensor.begin == end,
        "[safetensors] expected the next tensor at byte {}, got byte {} (tensor {}, {})", end,
        tensor.begin, shown_name(tensor.name), path);
    end = tensor.end;
  }
  require<IoError>(end == buffer_nbytes, "[safetensors] expected {} bytes of tensors, got {} ({})",
                   end, buffer_nbytes, path);
  return header;
}

}  // namespace tessera::engine
