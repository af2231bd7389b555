// One of the processes that mpi_transport_test starts: mpi_process WHAT [KEY=VALUE ...]. It prints
// what it finds, a line each, and ends with 0 if that is well.
#include <dlfcn.h>
#include <fmt/core.h>

#include <chrono>
#include <cstddef>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mpi/mpi_transport.h"
#include "engine/error.h"
#include "tests/comm/transport_promises.h"

namespace {

using tessera::comm::make_mpi_transport;
using tessera::comm::MpiFamily;
using tessera::comm::MpiOptions;

MpiOptions options_of(const std::vector<std::string>& words) {
  MpiOptions options;
  for (const std::string& word : words) {
    const std::size_t end = word.find('=');
    const std::string key = word.substr(0, end), value = word.substr(end + 1);
    if (key == "library") options.library_path = value;
    if (key == "family")
      options.family = value == "mpich" ? MpiFamily::kMpich : MpiFamily::kOpenMpi;
    if (key == "chunk") options.chunk_nbytes = std::stoul(value);
  }
  return options;
}

// Keeps its promises.
int promises(const MpiOptions& options) {
  const auto transport = make_mpi_transport(options);
  std::cout << fmt::format("{} of {}, {}\n", transport->process(), transport->num_processes(),
                           transport->str())
            << std::flush;
  const auto broken = tessera::comm::broken_promises(*transport);
  for (const std::string& text : broken) std::cout << text + "\n" << std::flush;
  return broken.empty() ? 0 : 1;
}

// Keeps its promises where the program has started MPI itself.
int shares(const MpiOptions& options) {
  constexpr int kMultiple = 3;  // MPI_THREAD_MULTIPLE
  const char* name = options.family == MpiFamily::kMpich ? "libmpich.so.12" : "libmpi.so.40";
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  const auto init =
      reinterpret_cast<int (*)(int*, char***, int, int*)>(dlsym(library, "MPI_Init_thread"));
  const auto finalize = reinterpret_cast<int (*)()>(dlsym(library, "MPI_Finalize"));
  int level = 0;
  if (init(nullptr, nullptr, kMultiple, &level) != 0) return 1;
  const int code = promises(options);
  return finalize() != 0 ? 1 : code;  // it has not been called
}

// Is asked for a second time, while the first one is there and afterwards.
int twice(const MpiOptions& options) {
  auto transport = make_mpi_transport(options);
  for (int i = 0; i < 2; ++i) {
    try {
      make_mpi_transport(options);
      std::cout << "not refused\n";
    } catch (const tessera::engine::CommError& error) {
      std::cout << std::string(error.what()) + "\n" << std::flush;
    }
    transport.reset();
  }
  return 0;
}

// Ends while it waits for a message that does not come.
int abandons(const MpiOptions& options) {
  const auto bytes = std::make_shared<std::vector<std::byte>>(8);
  const std::weak_ptr<std::vector<std::byte>> kept = bytes;
  {
    const auto transport = make_mpi_transport(options);
    transport->receive(1 - transport->process(), 0, *bytes, bytes)
        ->wait_for(std::chrono::milliseconds(1));
  }
  // One owner here, one there.
  std::cout << (kept.use_count() == 2 ? "ended, kept\n" : "ended, released\n") << std::flush;
  return 0;
}

// Ends by an exception when nothing is on its way, while the other process waits for it.
int fails(const MpiOptions& options) {
  const auto transport = make_mpi_transport(options);
  if (transport->process() == 0) tessera::engine::fail("the root cause");
  std::vector<std::byte> bytes(8);
  transport->receive(0, 0, bytes, nullptr)->wait_for(std::chrono::hours(1));
  return 0;
}

// Gives up when nothing is on its way, while the other process waits for it.
int gives_up(const MpiOptions& options) {
  auto transport = make_mpi_transport(options);
  if (transport->process() == 0) {
    transport->give_up();
    transport.reset();
    std::cout << "ended alone\n" << std::flush;
    return 1;
  }
  std::vector<std::byte> bytes(8);
  transport->receive(0, 0, bytes, nullptr)->wait_for(std::chrono::hours(1));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string what = words.empty() ? "" : words[0];
  try {
    const MpiOptions options = options_of(words);
    if (what == "promises") return promises(options);
    if (what == "shares") return shares(options);
    if (what == "twice") return twice(options);
    if (what == "abandons") return abandons(options);
    if (what == "fails") return fails(options);
    if (what == "gives_up") return gives_up(options);
    std::cerr << "expected promises, shares, twice, abandons, fails or gives_up, got " + what +
                     "\n";
  } catch (const tessera::engine::Error& error) {
    std::cout << std::string(error.what()) + "\n" << std::flush;
  }
  return 1;
}
