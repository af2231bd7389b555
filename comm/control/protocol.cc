#include "comm/control/protocol.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine/error.h"

namespace tessera::comm::control {
namespace {

using engine::CommError;
using engine::require;

using Length = std::uint32_t;
constexpr std::size_t kHeadNbytes = sizeof(Length) + 1;

template <class T>
constexpr bool kIsPlain = std::is_integral_v<T>;
template <std::size_t N>
constexpr bool kIsPlain<std::array<char, N>> = true;

struct Writer {
  std::string bytes;

  template <class T>
  void operator()(T& value) {
    if constexpr (kIsPlain<T>) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else {
      value.each(*this);
    }
  }
  void operator()(std::string& text) {
    length(text.size());
    bytes += text;
  }
  template <class T>
  void operator()(std::vector<T>& items) {
    length(items.size());
    for (T& item : items) (*this)(item);
  }

 private:
  void length(std::size_t size) {
    auto length = static_cast<Length>(size);
    (*this)(length);
  }
};

struct Reader {
  std::string_view bytes;

  template <class T>
  void operator()(T& value) {
    if constexpr (kIsPlain<T>) {
      std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    } else {
      value.each(*this);
    }
  }
  void operator()(bool& value) {
    const char byte = take(1)[0];
    require<CommError>(byte == 0 || byte == 1, "[control] expected 0 or 1, got {}", int{byte});
    value = byte == 1;
  }
  void operator()(std::string& text) { text = take(length()); }
  template <class T>
  void operator()(std::vector<T>& items) {
    const std::size_t size = length();
    constexpr std::size_t kMaxItems = 1 << 16;  // of at least a number each
    require<CommError>(size <= std::min(bytes.size() / sizeof(Length), kMaxItems),
                       "[control] expected a list within its frame, got {} items in {} bytes", size,
                       bytes.size());
    items.resize(size);
    for (T& item : items) (*this)(item);
  }

 private:
  std::string_view take(std::size_t nbytes) {
    require<CommError>(nbytes <= bytes.size(), "[control] expected {} bytes in a frame, got {}",
                       nbytes, bytes.size());
    const std::string_view taken = bytes.substr(0, nbytes);
    bytes.remove_prefix(nbytes);
    return taken;
  }
  std::size_t length() {
    Length length = 0;
    (*this)(length);
    return length;
  }
};

template <std::size_t kKind = 0>
Frame parse(std::size_t kind, std::string_view bytes) {
  if constexpr (kKind < std::variant_size_v<Frame>) {
    if (kind != kKind) return parse<kKind + 1>(kind, bytes);
    std::variant_alternative_t<kKind, Frame> frame;
    Reader reader{bytes};
    reader(frame);
    require<CommError>(reader.bytes.empty(),
                       "[control] expected the end of a frame, got {} more bytes",
                       reader.bytes.size());
    return frame;
  } else {
    engine::fail<CommError>("[control] expected a frame of a kind below {}, got {}", kKind, kind);
  }
}

}  // namespace

std::string encode(Frame frame) {
  Writer writer{.bytes = std::string(kHeadNbytes, '\0')};
  std::visit([&](auto& fields) { writer(fields); }, frame);
  const auto nbytes = static_cast<Length>(writer.bytes.size() - sizeof(Length));
  std::memcpy(writer.bytes.data(), &nbytes, sizeof(nbytes));
  writer.bytes[sizeof(Length)] = static_cast<char>(frame.index());
  return std::move(writer.bytes);
}

std::string last_call_text(const std::vector<RankCall>& calls) {
  std::vector<std::string_view> texts;
  std::string all;
  for (const RankCall& call : calls) {
    if (call.text.empty() || std::ranges::find(texts, call.text) != texts.end()) continue;
    all += texts.empty() ? "" : "; ";
    all += call.text;
    texts.push_back(call.text);
  }
  if (texts.empty()) return "it has called nothing yet";
  return (texts.size() == 1 ? "its last call: " : "its last calls: ") + all;
}

std::optional<Frame> FrameReader::next(std::size_t max_nbytes) {
  Length nbytes = 0;
  if (bytes_.size() < sizeof(nbytes)) return std::nullopt;
  std::memcpy(&nbytes, bytes_.data(), sizeof(nbytes));
  require<CommError>(nbytes >= 1 && nbytes <= max_nbytes,
                     "[control] expected a frame of 1 to {} bytes, got {}", max_nbytes, nbytes);
  const std::size_t end = sizeof(nbytes) + nbytes;
  if (bytes_.size() < end) return std::nullopt;
  const auto kind = static_cast<unsigned char>(bytes_[sizeof(nbytes)]);
  Frame frame = parse(kind, std::string_view(bytes_).substr(kHeadNbytes, nbytes - 1));
  bytes_.erase(0, end);
  return frame;
}

}  // namespace tessera::comm::control
