// Errors that say which configuration they are about.
#pragma once

#include <exception>
#include <string>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

/// What `fn` returns, with errors that name the configuration.
template <class F>
auto named(const std::string& name, F fn) {
  try {
    return fn();
  } catch (const engine::IoError& e) {
    engine::fail<engine::IoError>("{} (configuration {})", e.what(), engine::escaped(name));
  } catch (const engine::Error& e) {
    engine::fail("{} (configuration {})", e.what(), engine::escaped(name));
  }
}

}  // namespace tessera::tools
