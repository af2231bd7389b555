// Who keeps tensors that go with flats, and is told when these change.
#pragma once

namespace tessera::shard {

class Unit;

/// Keeps tensors that are laid out like flats, such as an optimizer's state.
class FlatUser {
 public:
  virtual ~FlatUser() = default;
  /// Around Fsdp::trainable_changed(), for each unit that is laid out again: its flats are about to
  /// go, and have come. Collective; parameters have their new `trainable` already.
  virtual void before_recut(const Unit& unit) = 0;
  virtual void after_recut(const Unit& unit) = 0;
};

}  // namespace tessera::shard
