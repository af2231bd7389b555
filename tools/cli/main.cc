#include "tools/cli/main.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>

#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/option_names.h"
#include "tools/cli/stop.h"
#include "tools/machine/environment.h"

namespace tessera::tools {
namespace {

// What a shell says of a program that SIGPIPE has ended.
constexpr int kReaderHasGone = 128 + SIGPIPE;

// Whether stdout is a pipe that nobody reads any more, as in `| head`.
bool has_no_reader() {
  pollfd out{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return ::poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

// Output that cannot be written is an error of the write, as on a full disk, and not a signal.
void prepare_output() {
  std::signal(SIGPIPE, SIG_IGN);  // the reader has gone
  std::signal(SIGXFSZ, SIG_IGN);  // the file is over the user's limit
  // A closed standard stream must not become the next file that is opened: what goes there goes
  // nowhere, and as these are read-only, writing fails.
  while (true) {
    const int fd = ::open("/dev/null", O_RDONLY);
    if (fd <= STDERR_FILENO && fd >= 0) continue;
    if (fd >= 0) ::close(fd);
    return;
  }
}

// Who was asked to stop waits for no reader for long.
void print_error(const char* message) {
  write_to_stderr({"error: ", message, "\n"}, stop_requested() != 0 ? kErrorPatience : kNoHurry);
}

// A library's destructor that finds no memory, for one: there is nobody left to catch it.
[[noreturn]] void terminate() {
  print_error("[terminate] expected to go on, got an error where none can be handled");
  std::_Exit(1);
}

// `message` may hold names and values from files.
void print_untrusted_error(const char* message) {
  try {
    print_error(engine::escaped_lines(message).c_str());
  } catch (const std::bad_alloc&) {
    print_error(kNoMemory);
  }
}

// A slip of the keyboard would pass in silence.
void warn_of_unread_variables() {
  for (const std::string& name : unread_variables(environment())) {
    const std::string_view meant =
        nearest_name(name, {kVariablesRead.begin(), kVariablesRead.end()});
    write_to_stderr({"warning: ", engine::escaped(name), " is set, and nothing reads it; ",
                     meant.empty() ? "--help shows what each program reads" : "did you mean ",
                     meant, meant.empty() ? "\n" : "?\n"},
                    kWarningPatience);
  }
}

}  // namespace

int run_main(const std::function<void()>& program) {
  std::set_terminate(terminate);
  prepare_output();
  try {
    warn_of_unread_variables();
    program();
    // A write that failed earlier leaves nothing to flush, but its mark.
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
    if (has_no_reader()) return kReaderHasGone;
    print_error("[stdout] expected to write all output, got an error");
  } catch (const std::bad_alloc&) {
    print_error(kNoMemory);
  } catch (const std::exception& e) {
    const auto* error = dynamic_cast<const std::system_error*>(&e);
    if (error != nullptr && error->code().value() == EPIPE && has_no_reader())
      return kReaderHasGone;  // that of a print
    std::fflush(stdout);
    print_untrusted_error(e.what());
    if (dynamic_cast<const TryAgain*>(&e) != nullptr) return kTryAgain;
  } catch (...) {
    print_error("unknown");
  }
  return 1;
}

}  // namespace tessera::tools
