#include "shard/checkpoint/pieces.h"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"
#include "shard/cut_values.h"
#include "shard/hooks/hook.h"

namespace tessera::shard {

using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tensor;

namespace {

constexpr std::int64_t kAlignmentNbytes = 256;

std::vector<std::int64_t> dims_of(const engine::Shape& shape) {
  return {shape.dims().begin(), shape.dims().end()};
}

// Bytes that a copy takes.
std::int64_t room_for(const SplitTensor& t) {
  const std::int64_t nbytes = t.numel() * size_of(t.dtype());
  return (nbytes + kAlignmentNbytes - 1) / kAlignmentNbytes * kAlignmentNbytes;
}

// Which copy of what it owns a rank has: of ddp each rank has all, of hsdp each replica.
struct Copy {
  int index, count;
};

Copy copy_of(const Mesh& mesh, Place place) {
  const int count = mesh.world().size() / mesh.num_parts(place);
  switch (place) {
    case Place::kWhole:
      return {mesh.world().rank(), count};
    case Place::kShard:
      return {mesh.replica(), count};
    case Place::kWorld:
      break;
  }
  return {0, count};
}

// The part of what it owns that a rank writes, so that every element is written once.
Range written_by(const Copy& copy, std::int64_t numel) {
  const auto cut = [&](int i) {
    return i == copy.count ? numel : numel / copy.count * i / kAlignmentNumel * kAlignmentNumel;
  };
  return {cut(copy.index), cut(copy.index + 1) - cut(copy.index)};
}

void add_flat(std::vector<CheckpointPiece>& pieces, const Flat& flat, const CheckpointPart& part) {
  const Mesh& mesh = part.fsdp->mesh();
  const Range mine = written_by(copy_of(mesh, flat.owner), flat.owned.numel);
  const std::vector<Segment> segments =
      flat.layout.segments(Range{flat.owned.begin + mine.begin, mine.numel});
  for (const OwnedTensor& tensor : owned_tensors(flat, part)) {
    for (const Segment& s : segments) {
      const Parameter& p = *flat.parameters[s.parameter];
      if (!tensor.has(p)) continue;
      pieces.push_back({.kind = tensor.kind,
                        .name = p.name,
                        .shape = dims_of(p.shape),
                        .begin = s.parameter_begin,
                        .values = tensor.values.slice(mine.begin + s.shard_begin, s.numel)});
    }
  }
}

void add_buffers(std::vector<CheckpointPiece>& pieces, const Fsdp& fsdp) {
  const comm::ProcessGroup& world = fsdp.mesh().world();
  const bool is_one = fsdp.options().broadcast_buffers;
  std::set<std::string> names;
  for (const Tensor& buffer : fsdp.buffers()) {
    engine::require(names.insert(buffer.name()).second,
                    "[checkpoint] expected buffers of different names, got two ({})",
                    buffer.name());
    if (is_one && world.rank() > 0) continue;
    pieces.push_back({.kind = "buffer",
                      .name = buffer.name(),
                      .part = is_one ? 0 : world.rank(),
                      .num_parts = is_one ? 1 : world.size(),
                      .shape = dims_of(buffer.shape()),
                      .values = SplitTensor(buffer.reshape({buffer.numel()}))});
  }
}

void add_hooks(std::vector<CheckpointPiece>& pieces, const Fsdp& fsdp) {
  const Memory host;
  for (const HookTensor& t : save_hooks(fsdp)) {
    const std::int64_t numel = t.whole_numel == 0 ? t.numel : t.whole_numel;
    engine::require(t.name.find('.') != std::string::npos && !t.name.starts_with("optimizer."),
                    "[checkpoint] expected a tensor of a hook called HOOK.TENSOR, got '{}' ({})",
                    t.name, t.parameter);
    engine::require(t.begin >= 0 && t.begin + t.numel <= numel && t.numel == std::ssize(t.values),
                    "[checkpoint] expected {} values of {} from {} on, within {}, got {} ({})",
                    t.numel, t.name, t.begin, numel, t.values.size(), t.parameter);
    pieces.push_back({.kind = t.name,
                      .name = t.parameter,
                      .part = t.part,
                      .num_parts = t.num_parts,
                      .shape = {numel},
                      .begin = t.begin,
                      .values = SplitTensor(Tensor::from<float>(host, {t.numel}, t.values, t.name,
                                                                engine::Category::kWorkspace))});
  }
}

}  // namespace

std::vector<OwnedTensor> owned_tensors(const Flat& flat, const CheckpointPart& part) {
  std::vector<OwnedTensor> tensors = {{"parameter", flat.master}};
  if (!flat.trainable) return tensors;
  for (const Optimizer* optimizer : part.optimizers) {
    const auto updates = [&](const Parameter* p) { return optimizer->updates(*p); };
    if (std::ranges::none_of(flat.parameters, updates)) continue;
    for (const std::string& name : optimizer->state_names()) {
      tensors.push_back(
          {fmt::format("optimizer.{}", name), optimizer->state({flat, 0}, name), optimizer});
    }
  }
  if (part.ema != nullptr) tensors.push_back({"ema", part.ema->average({flat, 0})});
  return tensors;
}

std::vector<CheckpointPiece> pieces_of(std::span<const CheckpointPart> parts) {
  std::vector<CheckpointPiece> pieces;
  for (const CheckpointPart& part : parts) {
    CutValues(*part.fsdp).check_at_rest("checkpoint");
    for (const auto& unit : part.fsdp->units()) {
      for (const Flat& flat : unit->flats()) add_flat(pieces, flat, part);
    }
    add_buffers(pieces, *part.fsdp);
    add_hooks(pieces, *part.fsdp);
  }
  return pieces;
}

Snapshot::Snapshot(const Stream& compute)
    : compute_(compute), stream_(compute.sibling("snapshot")), memory_(Memory::pinned(compute)) {}

Snapshot::~Snapshot() { stream_.synchronize_quietly(); }

void Snapshot::take(std::vector<CheckpointPiece>& pieces) {
  std::int64_t nbytes = 0;
  for (const CheckpointPiece& piece : pieces) nbytes += room_for(piece.values);
  if (!arena_.defined() || arena_.nbytes() < nbytes) {
    arena_ = {};
    arena_ = Tensor::empty(memory_, {nbytes}, DType::kU8, "snapshot", engine::Category::kWorkspace);
  }
  try {
    copy_beside(pieces);
  } catch (...) {  // no memory: nobody would wait for what was begun
    stream_.synchronize_quietly();
    throw;
  }
}

void Snapshot::copy_beside(std::vector<CheckpointPiece>& pieces) {
  stream_.wait(compute_.record("values"));
  std::int64_t at = 0;
  for (CheckpointPiece& piece : pieces) {
    const SplitTensor& t = piece.values;
    const Tensor copied(arena_.buffer(), at, {t.numel()}, t.dtype());
    at += room_for(t);
    // The next forward writes buffers.
    copy(copied, t, piece.kind == "buffer" ? compute_ : stream_, "snapshot");
    piece.values = SplitTensor(copied);
  }
  stream_.wait(compute_.record("buffers"));
  taken_ = stream_.record("taken");
}

}  // namespace tessera::shard
