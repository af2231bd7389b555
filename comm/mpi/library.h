// An MPI library, found when it is asked for, whichever its ABI. Private to comm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/mpi/mpi_transport.h"

namespace tessera::comm {

/// Functions return MPI's error codes, of which 0 is success, where they say nothing else. They are
/// called one at a time, start() and finish() by one thread.
class MpiLibrary {
 public:
  /// Handles, int or pointer.
  using Request = std::uintptr_t;
  using Arrival = std::uintptr_t;

  /// Throws DeviceError if there is none, or one whose ABI is not known. Stays loaded for good.
  static std::unique_ptr<MpiLibrary> load(const MpiOptions& options);
  virtual ~MpiLibrary() = default;

  /// "Open MPI 4.1.4".
  virtual std::string name() const = 0;
  /// Starts MPI, unless the program has, and makes a communicator of our own. Throws CommError.
  virtual void start() = 0;
  virtual int process() const = 0;
  virtual int num_processes() const = 0;

  virtual int isend(const std::byte* data, int nbytes, int process, int tag, Request& request) = 0;
  /// Whether the next message has come, and how long it is. Then irecv() takes it.
  virtual int improbe(int process, int tag, bool& found, Arrival& arrival, int& nbytes) = 0;
  virtual int irecv(std::byte* data, int nbytes, Arrival& arrival, Request& request) = 0;
  virtual int test(Request& request, bool& done) = 0;
  /// Lets MPI go on with what it still does for messages that are done here.
  virtual void progress() = 0;
  /// Ends MPI, if start() has started it.
  virtual void finish() = 0;

  virtual std::string error_text(int code) const = 0;
};

}  // namespace tessera::comm
