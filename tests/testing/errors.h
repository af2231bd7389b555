// What an error says.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::testing {

/// The message of the `E` that `fn` throws. Anything else fails the test.
template <class E, class F>
std::string error_of(F&& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

/// For EXPECT_EXIT with status 0: says on stderr what `fn` returns, in brackets, or the error that
/// it throws.
template <class F>
[[noreturn]] void say_and_exit(F&& fn) {
  try {
    std::fprintf(stderr, "[%s]", std::string(fn()).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s", error.what());
  }
  std::exit(0);
}

/// Whether `text` holds all of `parts`.
inline ::testing::AssertionResult has(std::string_view text,
                                      std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (text.find(part) == std::string_view::npos) {
      return ::testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tessera::testing
