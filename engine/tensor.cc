#include "engine/tensor.h"

#include <cstring>
#include <utility>

#include "engine/cuda.h"
#include "engine/memory_listener.h"

namespace tessera::engine {
namespace {

constexpr std::int64_t kMaxNumel = std::int64_t{1} << 59;  // bytes of any dtype fit in 63 bits

}  // namespace

Shape::Shape(std::span<const std::int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  require(dims.size() <= kMaxRank, "[shape] expected at most {} dimensions, got {}", kMaxRank,
          dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) {
    require(dims[i] >= 0, "[shape] expected a dimension of at least 0, got {}", dims[i]);
    dims_[i] = dims[i];
    const bool overflow = __builtin_mul_overflow(numel_, dims[i], &numel_);
    require(!overflow && numel_ < kMaxNumel, "[shape] expected fewer than 2^59 elements, got more");
  }
}

std::int64_t Shape::dim(int i) const {
  const int index = i < 0 ? i + rank_ : i;
  require(index >= 0 && index < rank_, "[shape] expected a dimension index below {}, got {}", rank_,
          i);
  return dims_[static_cast<std::size_t>(index)];
}

std::int64_t Shape::rows() const {
  std::int64_t n = 1;
  for (int i = 0; i + 1 < rank_; ++i) n *= dims_[static_cast<std::size_t>(i)];
  return n;
}

Shape Shape::drop_last() const {
  require(rank_ > 0, "[shape] expected at least one dimension, got a scalar");
  return Shape(dims().first(static_cast<std::size_t>(rank_ - 1)));
}

Shape Shape::with_last(std::int64_t dim) const {
  require(rank_ > 0, "[shape] expected at least one dimension, got a scalar");
  std::array<std::int64_t, kMaxRank> copy = dims_;
  copy[static_cast<std::size_t>(rank_ - 1)] = dim;
  return Shape(std::span<const std::int64_t>(copy.data(), static_cast<std::size_t>(rank_)));
}

std::string Shape::str() const {
  std::string text = "(";
  for (int i = 0; i < rank_; ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", dims_[static_cast<std::size_t>(i)]);
  }
  return text + ")";
}

Tensor::Tensor(std::shared_ptr<Buffer> buffer, std::int64_t offset_nbytes, const Shape& shape,
               DType dtype)
    : buffer_(std::move(buffer)), offset_nbytes_(offset_nbytes), shape_(shape), dtype_(dtype) {
  require(offset_nbytes >= 0 && nbytes() <= buffer_->nbytes() - offset_nbytes,
          "[tensor] expected {} bytes at {} to fit in {} ({})", nbytes(), offset_nbytes,
          buffer_->nbytes(), buffer_->name());
}

Tensor Tensor::empty(const Memory& memory, const Shape& shape, DType dtype, std::string_view name,
                     Category category) {
  const Tensor t(
      Buffer::create(memory, std::string(name), shape.numel() * size_of(dtype), category), 0, shape,
      dtype);
  if (memory.listener() != nullptr) memory.listener()->on_tensor(t.raw(), shape, dtype);
  return t;
}

Tensor Tensor::zeros(const Memory& memory, const Shape& shape, DType dtype, std::string_view name,
                     Category category) {
  Tensor t = empty(memory, shape, dtype, name, category);
  memory.fill(t.raw(), 0, t.nbytes());
  return t;
}

const std::string& Tensor::name() const {
  static const std::string kUndefined = "undefined tensor";
  return buffer_ ? buffer_->name() : kUndefined;
}

TensorKey Tensor::key() const {
  require(defined(), "[tensor] expected a defined tensor");
  return {buffer_->memory().id(), buffer_->serial(), offset_nbytes_, numel()};
}

Tensor Tensor::without_data() const {
  require(defined(), "[tensor] expected a defined tensor");
  Tensor t = *this;
  t.buffer_ = buffer_->without_data();
  return t;
}

std::byte* Tensor::raw() const {
  require(defined(), "[tensor] expected a defined tensor");
  return buffer_->data() + offset_nbytes_;
}

Tensor Tensor::reshape(const Shape& shape) const {
  require(shape.numel() == numel(), "[reshape] expected {} elements, got {} ({})", numel(), shape,
          name());
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::slice(std::int64_t begin, const Shape& shape) const {
  require(begin >= 0 && shape.numel() <= numel() - begin,
          "[slice] expected {} elements at {} to fit in {} ({})", shape.numel(), begin, numel(),
          name());
  return Tensor(buffer_, offset_nbytes_ + begin * size_of(dtype_), shape, dtype_);
}

float Tensor::item() const {
  require(numel() == 1, "[item] expected one element, got {} ({})", shape_, name());
  return dispatch_float(dtype_, "item", [this](auto t) {
    copy_to_host(&t);
    return to_f32(t);
  });
}

void Tensor::copy_from_host(const void* values, std::int64_t numel) const {
  require(numel == this->numel(), "[tensor] expected {} values for {}, got {} ({})", this->numel(),
          shape_, numel, name());
  if (numel == 0 || device().is_meta) return;
  if constexpr (kCudaBuilt) {
    if (device().is_cuda()) {
      return cuda::copy(*buffer_->memory().home(), raw(), static_cast<const std::byte*>(values),
                        nbytes());
    }
  }
  std::memcpy(raw(), values, static_cast<std::size_t>(nbytes()));
}

void Tensor::copy_to_host(void* values) const {
  if (numel() == 0) return;
  require(!device().is_meta, "[tensor] expected values, got memory of {} ({})", to_string(device()),
          name());
  if constexpr (kCudaBuilt) {
    if (device().is_cuda()) {
      const Stream& home = *buffer_->memory().home();
      // First, as a copy to pageable memory waits inside the driver: other threads, whose kernels
      // this stream may be waiting for, could not get in to launch them.
      home.synchronize();
      cuda::copy(home, static_cast<std::byte*>(values), raw(), nbytes());
      return home.synchronize();
    }
  }
  std::memcpy(values, raw(), static_cast<std::size_t>(nbytes()));
}

}  // namespace tessera::engine
