#include "comm/process_group.h"

#include <cstddef>
#include <functional>

namespace tessera::comm {
namespace {

using engine::DType;
using engine::require;

// What all tensors of a collective must be: defined and resident (raw() throws with the name).
void check_tensor(std::string_view op, std::string_view role, const Tensor& t, int rank) {
  require(t.defined(), "[{}] expected a tensor, got an undefined one ({}, rank {})", op, role,
          rank);
  t.raw();
}

void check_dtypes_equal(std::string_view op, const Tensor& in, const Tensor& out, int rank) {
  require(in.dtype() == out.dtype(), "[{}] expected out {}, got {} ({}, rank {})", op,
          name_of(in.dtype()), name_of(out.dtype()), out.name(), rank);
}

void check_reducible(std::string_view op, const Tensor& in, const Tensor& out, int rank) {
  require(in.dtype() == DType::kF32 || in.dtype() == DType::kBF16,
          "[{}] expected in f32 or bf16, got {} ({}, rank {})", op, name_of(in.dtype()), in.name(),
          rank);
  require(out.dtype() == DType::kF32, "[{}] expected out f32, got {} ({}, rank {})", op,
          name_of(out.dtype()), out.name(), rank);
}

void check_numel(std::string_view op, std::int64_t expected, const Tensor& t, int rank) {
  require(t.numel() == expected, "[{}] expected {} elements, got {} ({}, rank {})", op, expected,
          t.numel(), t.name(), rank);
}

// `allowed`: where `in` may lie although it is part of `out`, or the other way round.
void check_overlap(std::string_view op, const Tensor& in, const Tensor& out, bool allowed,
                   int rank) {
  const std::less<> before;
  const bool overlap = in.nbytes() > 0 && out.nbytes() > 0 &&
                       before(in.raw(), out.raw() + out.nbytes()) &&
                       before(out.raw(), in.raw() + in.nbytes());
  require(!overlap || allowed, "[{}] expected separate memory, got an overlap ({} and {}, rank {})",
          op, in.name(), out.name(), rank);
}

}  // namespace

void ProcessGroup::all_gather(const Tensor& in, const Tensor& out, const Stream& stream,
                              std::string_view label) {
  constexpr std::string_view kOp = "all_gather";
  check_tensor(kOp, "in", in, rank());
  check_tensor(kOp, "out", out, rank());
  check_dtypes_equal(kOp, in, out, rank());
  check_numel(kOp, in.numel() * size(), out, rank());
  check_overlap(kOp, in, out, in.raw() == out.raw() + rank() * in.nbytes(), rank());
  do_all_gather(in, out, stream, label);
}

void ProcessGroup::reduce_scatter(const Tensor& in, const Tensor& out, Accumulate accumulate,
                                  const Stream& stream, std::string_view label) {
  constexpr std::string_view kOp = "reduce_scatter";
  check_tensor(kOp, "in", in, rank());
  check_tensor(kOp, "out", out, rank());
  check_reducible(kOp, in, out, rank());
  check_numel(kOp, out.numel() * size(), in, rank());
  const bool own_block = in.dtype() == out.dtype() && accumulate == Accumulate::kNo &&
                         out.raw() == in.raw() + rank() * out.nbytes();
  check_overlap(kOp, in, out, own_block, rank());
  do_reduce_scatter(in, out, accumulate, stream, label);
}

void ProcessGroup::all_reduce(const Tensor& in, const Tensor& out, Accumulate accumulate,
                              const Stream& stream, std::string_view label) {
  constexpr std::string_view kOp = "all_reduce";
  check_tensor(kOp, "in", in, rank());
  check_tensor(kOp, "out", out, rank());
  check_reducible(kOp, in, out, rank());
  check_numel(kOp, in.numel(), out, rank());
  const bool in_place =
      in.dtype() == out.dtype() && accumulate == Accumulate::kNo && in.raw() == out.raw();
  check_overlap(kOp, in, out, in_place, rank());
  do_all_reduce(in, out, accumulate, stream, label);
}

void ProcessGroup::broadcast(const Tensor& inout, int root, const Stream& stream,
                             std::string_view label) {
  constexpr std::string_view kOp = "broadcast";
  check_tensor(kOp, "inout", inout, rank());
  require(root >= 0 && root < size(), "[{}] expected a root in [0, {}), got {} ({}, rank {})", kOp,
          size(), root, inout.name(), rank());
  do_broadcast(inout, root, stream, label);
}

void ProcessGroup::all_to_all(const Tensor& in, const Tensor& out, const Stream& stream,
                              std::string_view label) {
  constexpr std::string_view kOp = "all_to_all";
  check_tensor(kOp, "in", in, rank());
  check_tensor(kOp, "out", out, rank());
  check_dtypes_equal(kOp, in, out, rank());
  require(in.numel() % size() == 0, "[{}] expected a multiple of {} elements, got {} ({}, rank {})",
          kOp, size(), in.numel(), in.name(), rank());
  check_numel(kOp, in.numel(), out, rank());
  check_overlap(kOp, in, out, false, rank());
  do_all_to_all(in, out, stream, label);
}

}  // namespace tessera::comm
