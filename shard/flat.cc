#include "shard/flat.h"

#include <vector>

#include "engine/dtype.h"

namespace tessera::shard {

void copy_from_floats(const engine::Tensor& dst, std::span<const float> values) {
  engine::dispatch_float(dst.dtype(), "copy_from_floats", [&](auto zero) {
    std::vector<decltype(zero)> converted(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) engine::store_f32(converted[i], values[i]);
    dst.copy_from_host(converted.data(), static_cast<std::int64_t>(converted.size()));
  });
}

}  // namespace tessera::shard
