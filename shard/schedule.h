// When units are gathered, given back and reduced. The tape records the order of forward, so the
// order of backward is known before backward starts: prefetching follows a plan, never a guess. The
// first forward follows the declared order; later ones the order recorded before.
//
// [Note: visits]
// A unit may pack several neighbouring blocks, and a block may run several times before a backward.
// A visit is one pass over consecutive blocks of the unit: gathered when the first block starts,
// given back when the last one ends (or another unit starts). Backward meets the visits in reverse
// order: a visit's backward starts with its last block and ends when all its regions have ended. A
// region inside another one of the same unit, as where a weight is borrowed, is part of its visit.
//
// A visit of frozen parameters alone in which nothing was recorded is idle: below the lowest
// trainable parameter nobody wants a gradient, so its backward gathers nothing.
//
// A visit inside Tape::frozen() is idle in the same way if nothing was recorded. Otherwise its
// backward gathers parameters and makes no gradient of them: it needs no micro-step, and it is no
// backward that a micro-step counts.
//
// [Note: finality]
// A unit is reduced exactly once per micro-step: when the backward of its last visit has ended and
// no use of its parameters is pending, which the tape counts. The root's backward encloses all
// others, so of the root the uses alone decide: a head is reduced first, an embedding last, and so
// is a matrix that is both. Until then a gradient stays in its slot and grows. What a region that
// is recomputed will use counts as pending from its first forward on. Whatever is left when the
// micro-step ends is reduced then, in the declared order backwards. So the order of reductions
// follows from the program alone.
//
// Uses of frozen parameters hold no reduction up. So a region that is recomputed later may visit a
// unit that is reduced, as its first run has announced: that visit gathers what it computes with,
// and has no gradient.
//
// Where ranks may leave out different units (unused parameters), it cannot follow from what one
// rank does: every unit is then reduced in every micro-step, with a gradient of zero where there is
// none, in the declared order backwards; one that is final waits for those before it.
//
// [Note: shadows]
// A rank without a batch must still gather and reduce as its peers do. So what the hooks are called
// with is kept for each micro-step, and a shadow calls the hooks so again, without a tape between
// them: the same code issues the same collectives, and the gradients, which nobody writes, are
// zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/tape.h"
#include "shard/options.h"
#include "shard/replays.h"
#include "shard/unit.h"

namespace tessera::shard {

class Schedule : public engine::RegionHooks {
 public:
  /// `depth`: how many units ahead of the one at work are gathered, in backward from when
  /// `backward` says. `reduces_all`: every unit in every micro-step, in the declared order
  /// backwards.
  Schedule(int depth, BackwardPrefetch backward, const Placement& placement, bool reduces_all)
      : depth_(depth), backward_(backward), placement_(placement), reduces_all_(reduces_all) {}
  /// Unwraps the blocks.
  ~Schedule() override;
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// Wraps the unit's blocks, which nobody has wrapped. Units are added in the order in which
  /// forward is to use them, the root last.
  void add(Unit& unit);

  /// Ends visits of packed units that were left halfway: parameters change.
  void close_visits(const engine::Stream& compute);
  /// To be called between steps where masters of `unit` are written: what is gathered or computed
  /// with is renewed before it is used again.
  void mark_stale(Unit& unit) {
    unit.mark_stale();
    has_stale_ = true;
  }
  /// Renews the units that are stale, all at once: ranks may go on with different ones.
  void renew_stale(const engine::Stream& compute);
  /// Gathers all units, the root first, as the next forward needs it first. From then on none is
  /// given back, what is renewed is gathered again at once, and a forward that is recorded throws
  /// InvalidArgument.
  void keep_gathered(const engine::Stream& compute);
  /// After a change of parameters: gathers again what keep_gathered() keeps, if it does.
  void gather_kept(const engine::Stream& compute);
  /// Ends keep_gathered(), also where regions are open: gives all units back.
  void let_go(const engine::Stream& compute);
  bool keeps() const { return keeps_; }
  /// Forgets what is pending: a step was given up.
  void cancel(const engine::Stream& compute);
  /// `is_last`: of the step.
  void begin_micro_step(const MicroStep& options, bool is_last);
  /// Reduces what is left to reduce. Throws InvalidArgument for a recorded forward without a
  /// backward. Until the next one begins there is no backward.
  void end_micro_step(const engine::Stream& compute);
  /// Whether a backward has begun in this micro-step.
  bool has_run_backward() const { return num_backwards_ > 0; }
  /// Whether there was a micro-step that shadow() can repeat.
  bool can_shadow() const { return !last_calls_.empty(); }
  /// There is nothing to repeat any more: what is trainable has changed.
  void forget_calls() { last_calls_.clear(); }
  /// In a micro-step: takes part in it without a forward, as in the last one that had a backward.
  void shadow(const engine::Stream& compute);
  /// Gathers what the next forward needs first.
  void prefetch_first(const engine::Stream& compute);
  /// From now on calls `fn`, which may be null, with each unit that has been reduced for the last
  /// time in a step, once nothing computes with its parameters any more, see replays.h; never with
  /// the root. In an order that follows from the program alone.
  void on_final(std::function<void(Unit&)> fn) { on_final_ = std::move(fn); }

  void before_forward(const engine::Block& block, const engine::Tape& tape) override;
  void after_forward(const engine::Block& block, const engine::Tape& tape, bool has_ops) override;
  void before_backward(const engine::Block& block, const engine::Tape& tape) override;
  void after_backward(const engine::Block& block, const engine::Tape& tape) override;

 private:
  // Visits that a unit's forward encloses, as a part of order_.
  struct Span {
    std::size_t begin = 0, end = 0;
  };
  struct Visit {
    std::size_t last;  // block index
    engine::Pass pass;
    Span inside = {};
    int num_regions = 0;       // whose backward is to come
    bool is_replay = false;    // of a region that is recomputed, whose first run was here too
    bool is_idle = false;      // its backward needs no parameters: see [Note: visits]
    bool is_frozen = false;    // its backward makes no gradients of parameters: Tape::frozen()
    bool will_replay = false;  // backward will visit some of those inside again
  };
  // Of a unit, in a micro-step. Final: what is left of backward adds nothing to it.
  enum class Gradient { kOpen, kFinal, kReduced };
  // A unit and its visits.
  struct Visitor {
    Unit* unit;
    int num_open_blocks = 0;             // regions between before_forward and after_forward
    std::optional<Visit> visit = {};     // the open forward visit
    std::vector<Visit> recorded = {};    // closed ones whose backward is to come
    std::optional<Visit> backward = {};  // the one in backward
    bool is_visited = false;             // by a forward of this micro-step that has a backward
    Gradient gradient = Gradient::kOpen;
    bool has_stray = false;  // recorded between steps, for no backward

    bool is_final() const { return gradient != Gradient::kOpen; }
    bool is_reduced() const { return gradient == Gradient::kReduced; }
    void end_gradient() { gradient = std::max(gradient, Gradient::kFinal); }
  };
  struct Position {
    Visitor* visitor;
    std::size_t index;  // of the block in the unit
  };
  // What a hook is called with; shadows repeat it.
  struct Call {
    enum class Hook { kBeforeForward, kAfterForward, kBeforeBackward, kAfterBackward, kLastUse };
    Hook hook;
    const engine::Block* block;
    engine::Pass pass;  // of a forward
    // Of trainable parameters, before the backward of a reduced unit or after that of a visit.
    bool has_pending_uses = {};
    bool has_ops = {};    // after a forward: some were recorded
    bool is_frozen = {};  // of a forward
  };

  void forget();
  void refuse_stray_forward(const engine::Tape& tape);
  void begin_backwards(bool is_frozen);
  const Position& position_of(const engine::Block& block) const;
  void call(const Call& call, const engine::Stream& compute);
  void run(const Call& call, const engine::Stream& compute);
  void begin_forward(const Position& at, const engine::Stream& compute, const Call& call);
  void end_forward(const Position& at, const engine::Stream& compute, bool has_ops);
  bool joins_visit(const Position& at, const Call& call);
  void begin_backward(const Position& at, const engine::Stream& compute, bool has_pending_uses);
  void end_backward(const Position& at, const engine::Stream& compute, bool has_pending_uses);
  bool is_replaying() const { return num_open_backwards_ > 0; }
  void enter_forward(Visitor& visitor, const engine::Stream& compute, const Call& call,
                     bool is_replay);
  void mark_replay();
  void close_visit(Visitor& visitor, const engine::Stream& compute);
  void close_pending(const Visitor& entering, const engine::Stream& compute);
  void enter_backward(Visitor& visitor, const engine::Stream& compute);
  void prefetch(Visitor& next, const engine::Stream& compute, const char* why) const;
  void prefetch_pending(int count, const engine::Stream& compute) const;
  bool completes_gradient(const Visitor& visitor, bool has_pending_uses) const;
  void end_gradient(Visitor& visitor, const engine::Stream& compute);
  void reduce_final(const engine::Stream& compute);
  void reduce(Visitor& visitor, const engine::Stream& compute);
  void tell_final(const engine::Stream& compute);

  int depth_;
  BackwardPrefetch backward_;
  Placement placement_;
  bool reduces_all_;
  std::deque<Visitor> visitors_;  // in declared order; addresses stay
  std::unordered_map<const engine::Block*, Position> positions_;
  std::vector<Visitor*> reduce_order_;  // the declared one backwards, the root last

  std::vector<Visitor*> order_;      // planned forward visits, root left out
  std::vector<Visitor*> forward_;    // those of the forward at work
  Span planned_;                     // of order_: the next planned visit, and the end of the plan
  std::vector<Visitor*> pending_;    // recorded visits whose backward is to come
  Visitor* last_entered_ = nullptr;  // its visit may still be open
  bool in_backward_ = false;
  bool is_counted_ = false;  // this backward, in num_backwards_
  int num_open_backwards_ = 0;
  int num_backwards_ = 0;  // begun in this micro-step
  MicroStep micro_step_;
  bool is_last_ = true;
  std::function<void(Unit&)> on_final_;
  std::vector<Visitor*> untold_;  // reduced for the last time, in order, and perhaps still in use
  Replays replays_;
  bool has_stale_ = false;  // some units may be
  bool keeps_ = false;      // see keep_gathered()
  bool in_micro_step_ = false;
  bool has_recorded_ = false;     // a forward, in this micro-step
  bool is_shadow_ = false;        // the micro-step
  std::vector<Call> calls_;       // of the micro-step
  std::vector<Call> last_calls_;  // of the last one that had a backward
};

}  // namespace tessera::shard
