#include "shard/optimizer/update_parts.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "engine/copy.h"

namespace tessera::shard {

using engine::Event;
using engine::Stream;
using engine::Tensor;

std::vector<UpdatePart> parts_of(const Flat& flat, const Fsdp& fsdp, const std::string& unit) {
  const std::int64_t numel = flat.owned.numel;
  const std::int64_t on_host = SplitTensor::host_numel(numel, fsdp.options().offload.optimizer);
  std::vector<UpdatePart> parts;
  const auto add = [&](std::int64_t begin, std::int64_t end, bool is_on_host, std::size_t host) {
    const Range range{begin, end - begin};
    parts.push_back({.range = range,
                     .segments = flat.layout.segments({flat.owned.begin + begin, range.numel}),
                     .is_on_host = is_on_host,
                     .host = host});
    if (is_on_host || !fsdp.memory().device().is_cuda()) return;
    parts.back().tiles =
        range.numel == numel
            ? flat.tiles
            : make_tile_table(fsdp.memory(), parts.back().segments, unit + ".tiles");
  };
  // Where the sum is cut, which counts from the begin of its own range.
  const std::int64_t sum_numel = flat.gradient_range.numel;
  const std::int64_t sum_split =
      sum_numel - SplitTensor::host_numel(sum_numel, fsdp.options().offload.gradients) -
      (flat.owned.begin - flat.gradient_range.begin);
  std::array<std::int64_t, 5> ends = {0, flat.master.split(),
                                      std::clamp(sum_split, std::int64_t{0}, numel),
                                      numel - on_host, numel};
  std::ranges::sort(ends);
  const auto num_hosts =
      static_cast<std::int64_t>(fsdp.offload() == nullptr ? 1 : fsdp.offload()->hosts().size());
  for (std::size_t i = 1; i < ends.size(); ++i) {
    const std::int64_t begin = ends[i - 1], end = ends[i];
    if (begin == end) continue;
    if (begin < numel - on_host) {
      add(begin, end, false, 0);
      continue;
    }
    const std::int64_t grains = (end - begin + kAlignmentNumel - 1) / kAlignmentNumel;
    std::int64_t from = begin;
    for (std::int64_t h = 0; h < num_hosts; ++h) {
      const std::int64_t to = std::min(end, begin + grains * (h + 1) / num_hosts * kAlignmentNumel);
      if (from < to) add(from, to, true, static_cast<std::size_t>(h));
      from = to;
    }
  }
  if (parts.empty()) add(0, numel, false, 0);
  return parts;
}

UpdateParts::UpdateParts(const Fsdp& fsdp, const std::vector<Cut>& cuts)
    : offload_(*fsdp.offload()) {
  // Most bytes of a part that is brought, by where to.
  std::int64_t masters[2] = {}, sums[2] = {};
  for (const auto& [flat, parts] : cuts) {
    for (const UpdatePart& part : *parts) {
      const auto count = [&part](const SplitTensor& t, std::int64_t* most) {
        const std::int64_t begin = part.range.begin, numel = part.range.numel;
        if (t.slice(begin, numel).has_host() == part.is_on_host) return;
        most[part.is_on_host] = std::max(most[part.is_on_host], numel * engine::size_of(t.dtype()));
      };
      count(flat->master, masters);
      count(flat->grad_sum, sums);
    }
  }
  for (const bool to_host : {false, true}) {
    const engine::Memory& memory = to_host ? fsdp.host_memory() : fsdp.memory();
    // Two, so that one is brought while the other is used; each thread has a part.
    const int count = to_host ? 2 * static_cast<int>(offload_.hosts().size()) : 2;
    const auto make = [&](std::int64_t nbytes, const char* name) {
      return nbytes == 0 ? nullptr
                         : std::make_unique<SlotRing>(memory, name, nbytes, count,
                                                      engine::Category::kWorkspace);
    };
    masters_[to_host] = make(masters[to_host], "update.master");
    sums_[to_host] = make(sums[to_host], "update.grad_sum");
  }
}

UpdateParts::Here UpdateParts::bring(const SplitTensor& t, bool to_host,
                                     std::unique_ptr<SlotRing>& ring, const std::string& unit,
                                     const std::vector<Event>& ready, const Stream& to) {
  if (t.has_host() == to_host) return {to_host ? t.host() : t.device()};
  const Tensor& from = to_host ? t.device() : t.host();
  SlotRing::Slot& slot = ring->borrow(unit, from.nbytes(), [] { return false; });
  const Tensor brought(slot.buffer, 0, from.shape(), from.dtype());
  const Stream& stream = to_host ? offload_.down() : offload_.up();
  stream.wait(slot.last_use);
  for (const Event& event : ready) stream.wait(event);
  engine::copy(brought, from, stream, "bring");
  to.wait(stream.record("brought"));
  return {brought, &slot};
}

UpdateParts::Written UpdateParts::run(const Flat& flat, const std::vector<UpdatePart>& parts,
                                      const Unit& unit, const Stream& stream,
                                      const Update& update) {
  Written written{.by = stream, .on_host = {}};
  const std::vector<Event> ready = {stream.record("sums"), unit.sum_stored()};
  std::size_t next_host = 0;  // that casts what is returned
  for (const UpdatePart& part : parts) {
    const bool on_host = part.is_on_host;
    const Stream& at = on_host ? offload_.hosts()[part.host] : stream;
    for (const Event& event : ready) {
      if (on_host) at.wait(event);
    }
    const SplitTensor home = flat.master.slice(part.range.begin, part.range.numel);
    const SplitTensor sum = flat.grad_sum.slice(part.range.begin, part.range.numel);
    const Here g = bring(sum, on_host, sums_[on_host], unit.name(), ready, at);
    const Here p = bring(home, on_host, masters_[on_host], unit.name(), ready, at);
    update(part, p.tensor, g.tensor, at);
    const Event updated = at.record("updated");
    if (g.slot != nullptr) sums_[on_host]->give_back(*g.slot, updated);
    if (p.slot != nullptr) {
      const Stream& back = on_host ? offload_.up() : offload_.down();
      back.wait(updated);
      engine::copy(on_host ? home.device() : home.host(), p.tensor, back, "bring back");
      const Event returned = back.record("returned");
      masters_[on_host]->give_back(*p.slot, returned);
      if (on_host) {
        written.by = back;
      } else {
        written.on_host.push_back({part.range, returned, next_host});
        next_host = (next_host + 1) % offload_.hosts().size();
      }
    } else if (on_host) {
      written.on_host.push_back({part.range, updated, part.host});
    }
  }
  if (written.by != stream) written.by.wait(stream.record("updated"));
  return written;
}

}  // namespace tessera::shard
