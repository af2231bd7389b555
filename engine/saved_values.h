// Finds writes to what backward needs: a tensor that is changed in place after an op has saved it
// gives a wrong gradient, and nothing else would say so. With MemoryOptions::check_saved a tape
// keeps checksums of what its entries saved, and looks again just before they are used. This reads
// each tensor twice, on the host, for each op that saves it: for a few steps of a search, not for
// training.
//
// [Note: what an entry saved]
// An op hands the tape a closure; the tensors in it are what it saved. Each copy of the closure has
// a handle more of each of them, so buffers whose handles grow in number as it is copied are those.
// It is copied many times, as other streams may take or drop a few handles meanwhile. What a
// closure holds by a pointer of its own is not seen. Only activations are checked: the memory of
// parameters and their gradients is written between forward and backward by design.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

class SavedValues {
 public:
  SavedValues() = default;
  /// Of the activations of `memory` that `closure` holds, as they are once `compute` has done what
  /// it was told. Of a stream that simulates: nothing.
  template <class F>
  SavedValues(const Memory& memory, const Stream& compute, const std::function<F>& closure)
      : SavedValues(memory, compute,
                    [&closure] { return std::make_shared<std::function<F>>(closure); }) {}

  /// Throws InvalidArgument that names `op` and the tensor if one of them has other bytes.
  void check(const Stream& compute, std::string_view op) const;

 private:
  using Copy = std::function<std::shared_ptr<void>()>;
  struct Value {
    std::weak_ptr<Buffer> buffer;
    std::uint64_t checksum;
  };
  SavedValues(const Memory& memory, const Stream& compute, const Copy& copy);

  std::vector<Value> values_;
};

/// Of the bytes of a tensor, as they are once `compute` has done what it was told; 0 where there
/// are none to be read.
std::uint64_t checksum_of(const Stream& compute, const Tensor& tensor);

}  // namespace tessera::engine
