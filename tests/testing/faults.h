// System calls that go wrong at a chosen moment.
//
//   run_program(path, flags, with_fault({"rename,unlink", below(folder, "model/"), 2, "kill"}));
//   { const FaultHere fault({"fsync", below(folder, "model/"), 1, std::to_string(EIO)}); ... }
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <map>
#include <string>

#include "tests/testing/temp_folder.h"

extern "C" void tessera_reset_faults();

namespace tessera::testing {

struct Fault {
  std::string calls;   ///< of rename, unlink, mkdir, rmdir, opendir, open, create, fsync, flock,
                       ///< write, close, send; or "bytes": all writes once `at` bytes are written
  std::string part;    ///< of the path (of a rename: the old one; of a socket: "socket")
  int at = 1;          ///< which of these calls, from 1; 0: all are only written down, a line each,
                       ///< in the file that `action` names; -1: with whole paths
  std::string action;  ///< "kill"; "exit", with 0; an error number; "short": of a write, which
                       ///< takes one byte; or a path: makes that file and waits until it is gone.
                       ///< Just before the call, which fails with an error only.

  std::string text() const { return calls + "|" + part + "|" + std::to_string(at) + "|" + action; }
};

/// The end of a path below `folder`, without what links make of its beginning.
inline std::string below(const TempFolder& folder, const std::string& name) {
  return std::filesystem::path(folder.path()).filename().string() + "/" + name;
}

/// The environment of a program that has the fault.
inline std::map<std::string, std::string> with_fault(const Fault& fault) {
  return {{"LD_PRELOAD", std::filesystem::absolute("tests/testing/libfaults.so").string()},
          {"TEST_FAULT", fault.text()}};
}

/// The fault in this process; needs :faults.
class FaultHere {
 public:
  explicit FaultHere(const Fault& fault) {
    tessera_reset_faults();
    ::setenv("TEST_FAULT", fault.text().c_str(), 1);
  }
  ~FaultHere() { ::unsetenv("TEST_FAULT"); }
  FaultHere(const FaultHere&) = delete;
  FaultHere& operator=(const FaultHere&) = delete;
};

}  // namespace tessera::testing
