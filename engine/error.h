// Errors: four kinds, one message formula: "[where] expected X, got Y (name, rank)".
// Thrown by value, caught by reference; nothing in the engine returns status codes.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::engine {

/// Base of all errors the engine throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake: a shape, dtype, range or order that an interface refuses.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A device failed: out of memory, failed launch.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A collective failed: peer gone, mismatch, deadline. The group is unusable afterwards.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A file or stream could not be read or written, or holds what it must not.
class IoError : public Error {
 public:
  using Error::Error;
};

/// Throws `E` with the formatted message. Never inlined: kernels that may fail stay small.
template <class E = InvalidArgument, class... Args>
[[noreturn, gnu::noinline, gnu::cold]] void fail(fmt::format_string<Args...> format,
                                                 Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws `E` with the formatted message unless `ok`. Arguments are formatted only on failure.
template <class E = InvalidArgument, class... Args>
void require(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) [[unlikely]] {
    fail<E>(format, std::forward<Args>(args)...);
  }
}

}  // namespace tessera::engine
