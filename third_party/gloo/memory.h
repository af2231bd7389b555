// Gloo's headers of its TCP transport include gloo/common/memory.h, which its installation leaves
// out. This stands in for it: members as there, and no function that only Gloo itself calls.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class WeakNonOwningPtr;

/// Keeps an object from being destroyed for a moment.
template <typename T>
class NonOwningPtr final {
 private:
  std::shared_ptr<T> ptr_;
};

/// In an object: what the two others refer to.
template <typename T>
class ShareableNonOwningPtr final {
 public:
  explicit ShareableNonOwningPtr(T* t);
  ShareableNonOwningPtr(const ShareableNonOwningPtr&) = delete;
  ShareableNonOwningPtr& operator=(const ShareableNonOwningPtr&) = delete;
  ~ShareableNonOwningPtr();

 protected:
  std::shared_ptr<T> ptr_;

  friend class WeakNonOwningPtr<T>;
};

/// Refers to an object that may be gone.
template <typename T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr() = default;
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& shareable);

 protected:
  std::weak_ptr<T> ptr_;

  friend class NonOwningPtr<T>;
};

}  // namespace gloo
