// What ThreadSanitizer takes for "happens before" on the emulated device: only what CUDA promises.
// [Note: true edges]
// The emulation's own locks would order everything with everything and hide a missing wait. So its
// insides run Unseen (their locks order nothing), and each edge that CUDA gives is stated by
// release_edge / acquire_edge on an object that stands for just that edge: a task (from its launch
// to its run), a record (from the recorded stream to whoever waits). Without the sanitizer all of
// this compiles to nothing.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define TESSERA_EMULATION_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TESSERA_EMULATION_TSAN 1
#endif
#endif

#ifdef TESSERA_EMULATION_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace tessera::cuda_emulation {

#ifdef TESSERA_EMULATION_TSAN

inline thread_local int unseen_depth = 0;

inline void ignore_begin() {
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void ignore_end() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}

/// While one lives, this thread's locks and accesses are not seen by ThreadSanitizer. Nests.
class Unseen {
 public:
  Unseen() {
    if (unseen_depth++ == 0) ignore_begin();
  }
  ~Unseen() {
    if (--unseen_depth == 0) ignore_end();
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

/// While one lives inside an Unseen, this thread is seen again.
class Seen {
 public:
  Seen() : depth_(unseen_depth) {
    if (depth_ > 0) ignore_end();
    unseen_depth = 0;
  }
  ~Seen() {
    unseen_depth = depth_;
    if (depth_ > 0) ignore_begin();
  }
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;

 private:
  int depth_;
};

/// What this thread did so far happens before what follows acquire_edge of the same object.
inline void release_edge(const void* object) {
  const Seen seen;
  __tsan_release(const_cast<void*>(object));
}
inline void acquire_edge(const void* object) {
  const Seen seen;
  __tsan_acquire(const_cast<void*>(object));
}

#else

// Not trivial, or compilers would call each that lives an unused variable.
// NOLINTBEGIN(modernize-use-equals-default)
class Unseen {
 public:
  Unseen() {}
  ~Unseen() {}
};
class Seen {
 public:
  Seen() {}
  ~Seen() {}
};
// NOLINTEND(modernize-use-equals-default)
inline void release_edge(const void*) {}
inline void acquire_edge(const void*) {}

#endif

}  // namespace tessera::cuda_emulation
