// Tensor: a contiguous value handle (buffer, offset, shape, dtype). Copies share the memory; views
// are an offset and a shape into the same buffer. No strides, no broadcasting.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "engine/buffer.h"
#include "engine/dtype.h"

namespace tessera::engine {

/// Up to 5 dimensions, each at least 0. A scalar has none.
class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims)
      : Shape(std::span<const std::int64_t>(dims.begin(), dims.size())) {}
  /// Throws InvalidArgument for more than kMaxRank dimensions, a negative one, or 2^59 elements.
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  /// Dimension `i`; negative counts from the end. Throws InvalidArgument out of range.
  std::int64_t dim(int i) const;
  std::int64_t numel() const { return numel_; }
  /// numel() / dim(-1): the rows of a matrix view. 1 for a scalar.
  std::int64_t rows() const;
  std::span<const std::int64_t> dims() const { return {dims_.data(), std::size_t(rank_)}; }
  /// All dimensions but the last.
  Shape drop_last() const;
  /// This shape with another last dimension.
  Shape with_last(std::int64_t dim) const;
  std::string str() const;  ///< "(2, 3)"

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
  std::int64_t numel_ = 1;
};

/// Identity of a tensor's elements: equal for handles and reshapes of the same elements.
struct TensorKey {
  const void* memory = nullptr;
  std::uint64_t serial = 0;  ///< of the buffer, in its memory
  std::int64_t offset_nbytes = 0;
  std::int64_t numel = 0;

  friend bool operator==(const TensorKey&, const TensorKey&) = default;
};
struct TensorKeyHash {
  std::size_t operator()(const TensorKey& k) const {
    return k.serial * 0x9E3779B97F4A7C15ull ^ std::size_t(k.offset_nbytes) * 0xC2B2AE3D27D4EB4Full ^
           std::size_t(k.numel);
  }
};

class Tensor {
 public:
  /// Undefined; defined() is false.
  Tensor() = default;
  /// A view of `buffer` at `offset_nbytes`. Throws InvalidArgument if it does not fit.
  Tensor(std::shared_ptr<Buffer> buffer, std::int64_t offset_nbytes, const Shape& shape,
         DType dtype);

  /// New memory, uninitialised / zero / from values.
  static Tensor empty(const Memory& memory, const Shape& shape, DType dtype,
                      std::string_view name = "tensor", Category category = Category::kActivation);
  static Tensor zeros(const Memory& memory, const Shape& shape, DType dtype,
                      std::string_view name = "tensor", Category category = Category::kActivation);
  template <class T>
  static Tensor from(const Memory& memory, const Shape& shape, std::span<const T> values,
                     std::string_view name = "tensor", Category category = Category::kActivation) {
    Tensor t = empty(memory, shape, DTypeOf<T>::value, name, category);
    t.copy_from_host(values.data(), static_cast<std::int64_t>(values.size()));
    return t;
  }

  bool defined() const { return buffer_ != nullptr; }
  const Shape& shape() const { return shape_; }
  std::int64_t dim(int i) const { return shape_.dim(i); }
  std::int64_t numel() const { return shape_.numel(); }
  std::int64_t nbytes() const { return numel() * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return buffer_ ? buffer_->device() : Device{}; }
  const std::string& name() const;
  const std::shared_ptr<Buffer>& buffer() const { return buffer_; }
  TensorKey key() const;
  /// This identity, name, shape and dtype, but no memory: reading it throws. For closures that
  /// need to say which tensor they mean and not what it holds.
  Tensor without_data() const;

  /// First element, an address of device(). Throws InvalidArgument if T is not the dtype or the
  /// buffer is released.
  template <class T>
  T* data() const {
    require(DTypeOf<T>::value == dtype_, "[tensor] expected {}, got {} ({})",
            name_of(DTypeOf<T>::value), name_of(dtype_), name());
    return reinterpret_cast<T*>(raw());
  }
  /// The elements, for the CPU. Throws InvalidArgument for memory that it cannot read.
  template <class T>
  std::span<T> span() const {
    require(device().is_host(), "[tensor] expected host memory, got {} ({})", to_string(device()),
            name());
    return {data<T>(), static_cast<std::size_t>(numel())};
  }
  std::byte* raw() const;

  /// These elements under another shape. Throws InvalidArgument if numel differs.
  Tensor reshape(const Shape& shape) const;
  /// Elements [begin, begin + shape.numel()) as `shape`. Throws InvalidArgument out of range.
  Tensor slice(std::int64_t begin, const Shape& shape) const;

  /// The value of a tensor with one element, as float (f32 or bf16). On a GPU blocks as
  /// copy_to_host().
  float item() const;

  /// Writes `numel` elements, which must be all. On a GPU this is work of the memory's stream; it
  /// has read `values` when it returns, unless they are in page-locked memory.
  void copy_from_host(const void* values, std::int64_t numel) const;
  /// Reads all elements. On a GPU blocks until what the memory's stream was told is done.
  void copy_to_host(void* values) const;

 private:
  std::shared_ptr<Buffer> buffer_;
  std::int64_t offset_nbytes_ = 0;
  Shape shape_;
  DType dtype_ = DType::kF32;
};

}  // namespace tessera::engine

/// So that messages take a shape as it is, and only those that are thrown write it out.
template <>
struct fmt::formatter<tessera::engine::Shape> {
  constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }
  template <class Context>
  auto format(const tessera::engine::Shape& shape, Context& context) const {
    // Not format_to(): what it calls in libfmt has another name for Clang than for GCC.
    const std::string text = shape.str();
    return std::copy(text.begin(), text.end(), context.out());
  }
};
