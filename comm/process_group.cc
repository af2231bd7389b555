#include "comm/process_group.h"

#include <fmt/format.h>

#include <cstddef>
#include <functional>
#include <utility>

namespace tessera::comm {
namespace {

using engine::DType;
using engine::require;
using engine::Work;

// What all tensors of a collective must be: defined, resident (raw() throws with the name), and
// where the stream works.
void check_tensor(std::string_view op, std::string_view role, const Tensor& t, const Stream& stream,
                  int rank) {
  require(t.defined(), "[{}] expected a tensor, got an undefined one ({}, rank {})", op, role,
          rank);
  t.raw();
  const engine::Device device = stream.device();
  require(device.is_cuda() || device.is_meta ? t.device() == device : t.device().is_host(),
          "[{}] expected memory of {}, got {} ({}, rank {})", op, to_string(device),
          to_string(t.device()), t.name(), rank);
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

// The part of `nbytes` that belongs to the other ranks.
std::int64_t share_of_others(std::int64_t nbytes, int size) { return nbytes - nbytes / size; }

std::string_view onto(Accumulate accumulate) {
  return accumulate == Accumulate::kYes ? " onto a sum" : "";
}

}  // namespace

Traffic ProcessGroup::traffic() const { return {traffic_->num_collectives, traffic_->bytes_sent}; }

std::unique_ptr<ProcessGroup> ProcessGroup::split(int color, int key) {
  std::unique_ptr<ProcessGroup> part = make_part(color, key);
  part->traffic_ = traffic_;
  return part;
}

std::unique_ptr<ProcessGroup> ProcessGroup::split_by(const std::function<int(int rank)>& color) {
  std::unique_ptr<ProcessGroup> part = make_part_by(color);
  part->traffic_ = traffic_;
  return part;
}

std::unique_ptr<ProcessGroup> ProcessGroup::make_part_by(
    const std::function<int(int rank)>& color) {
  return make_part(color(rank()), rank());
}

void ProcessGroup::submit(Collective collective, std::int64_t numel, std::string_view more,
                          const Stream& stream) {
  Work& work = collective.work;
  work.bytes_sent = own_bytes_sent(collective).value_or(work.bytes_sent);
  collective.text = fmt::format("{} {} x {}{} '{}'", work.name, name_of(collective.in.dtype()),
                                numel, more, work.detail);
  traffic_->num_collectives += 1;
  traffic_->bytes_sent += enqueue(std::move(collective), stream);
}

void ProcessGroup::all_gather(const Tensor& in, const Tensor& out, const Stream& stream,
                              std::string_view label) {
  constexpr std::string_view kOp = "all_gather";
  check_tensor(kOp, "in", in, stream, rank());
  check_tensor(kOp, "out", out, stream, rank());
  check_dtypes_equal(kOp, in, out, rank());
  check_numel(kOp, in.numel() * size(), out, rank());
  check_overlap(kOp, in, out, in.raw() == out.raw() + rank() * in.nbytes(), rank());
  submit({.op = Collective::Op::kAllGather,
          .in = in,
          .out = out,
          .work = {.name = kOp,
                   .bytes_read = in.nbytes(),
                   .bytes_written = out.nbytes(),
                   .bytes_sent = in.nbytes() * (size() - 1),
                   .detail = std::string(label)}},
         in.numel(), "", stream);
}

void ProcessGroup::reduce_scatter(const Tensor& in, const Tensor& out, Accumulate accumulate,
                                  const Stream& stream, std::string_view label) {
  constexpr std::string_view kOp = "reduce_scatter";
  check_tensor(kOp, "in", in, stream, rank());
  check_tensor(kOp, "out", out, stream, rank());
  check_reducible(kOp, in, out, rank());
  check_numel(kOp, out.numel() * size(), in, rank());
  const bool adds = accumulate == Accumulate::kYes;
  const bool own_block =
      in.dtype() == out.dtype() && !adds && out.raw() == in.raw() + rank() * out.nbytes();
  check_overlap(kOp, in, out, own_block, rank());
  submit({.op = Collective::Op::kReduceScatter,
          .in = in,
          .out = out,
          .accumulate = accumulate,
          .work = {.name = kOp,
                   .flops = static_cast<double>(out.numel()) * (size() - 1 + adds),
                   .bytes_read = in.nbytes() + adds * out.nbytes(),
                   .bytes_written = out.nbytes(),
                   .bytes_sent = in.nbytes() / size() * (size() - 1),
                   .detail = std::string(label)}},
         out.numel(), onto(accumulate), stream);
}

void ProcessGroup::all_reduce(const Tensor& in, const Tensor& out, Accumulate accumulate,
                              const Stream& stream, std::string_view label) {
  constexpr std::string_view kOp = "all_reduce";
  check_tensor(kOp, "in", in, stream, rank());
  check_tensor(kOp, "out", out, stream, rank());
  check_reducible(kOp, in, out, rank());
  check_numel(kOp, in.numel(), out, rank());
  const bool adds = accumulate == Accumulate::kYes;
  const bool in_place = in.dtype() == out.dtype() && !adds && in.raw() == out.raw();
  check_overlap(kOp, in, out, in_place, rank());
  submit({.op = Collective::Op::kAllReduce,
          .in = in,
          .out = out,
          .accumulate = accumulate,
          .work = {.name = kOp,
                   .flops = static_cast<double>(out.numel()) * (size() - 1 + adds) / size(),
                   .bytes_read = in.nbytes() + adds * out.nbytes() / size(),
                   .bytes_written = out.nbytes(),
                   .bytes_sent = share_of_others(in.nbytes() + out.nbytes(), size()),
                   .detail = std::string(label)}},
         out.numel(), onto(accumulate), stream);
}

void ProcessGroup::broadcast(const Tensor& inout, int root, const Stream& stream,
                             std::string_view label) {
  constexpr std::string_view kOp = "broadcast";
  check_tensor(kOp, "inout", inout, stream, rank());
  require(root >= 0 && root < size(), "[{}] expected a root in [0, {}), got {} ({}, rank {})", kOp,
          size(), root, inout.name(), rank());
  submit({.op = Collective::Op::kBroadcast,
          .in = inout,
          .out = inout,
          .root = root,
          .work = {.name = kOp,
                   .bytes_read = inout.nbytes() / size(),
                   .bytes_written = share_of_others(inout.nbytes(), size()),
                   .bytes_sent = share_of_others(inout.nbytes(), size()),
                   .detail = std::string(label)}},
         inout.numel(), fmt::format(" from rank {}", world_rank(root)), stream);
}

void ProcessGroup::all_to_all(const Tensor& in, const Tensor& out, const Stream& stream,
                              std::string_view label) {
  constexpr std::string_view kOp = "all_to_all";
  check_tensor(kOp, "in", in, stream, rank());
  check_tensor(kOp, "out", out, stream, rank());
  check_dtypes_equal(kOp, in, out, rank());
  require(in.numel() % size() == 0, "[{}] expected a multiple of {} elements, got {} ({}, rank {})",
          kOp, size(), in.numel(), in.name(), rank());
  check_numel(kOp, in.numel(), out, rank());
  check_overlap(kOp, in, out, false, rank());
  submit({.op = Collective::Op::kAllToAll,
          .in = in,
          .out = out,
          .work = {.name = kOp,
                   .bytes_read = in.nbytes(),
                   .bytes_written = out.nbytes(),
                   .bytes_sent = share_of_others(in.nbytes(), size()),
                   .detail = std::string(label)}},
         in.numel(), "", stream);
}

}  // namespace tessera::comm
