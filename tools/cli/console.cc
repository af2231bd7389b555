#include "tools/cli/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/machine/environment_variable.h"

namespace tessera::tools {
namespace {

// Of ECMA-48; every terminal of today knows them.
constexpr std::string_view kEraseLine = "\r\x1b[K", kStrong = "\x1b[1m", kWarning = "\x1b[33m",
                           kReset = "\x1b[0m";
constexpr std::chrono::milliseconds kStatusInterval(100);

bool is_empty(const char* variable) { return environment_variable(variable).value_or("").empty(); }

// mpirun of Open MPI gives each process a terminal of its own, and passes on what is written there
// to whatever it may be.
bool is_terminal(int fd) {
  return ::isatty(fd) == 1 && environment_variable("TERM") != "dumb" &&
         is_empty("OMPI_COMM_WORLD_SIZE");
}

// A part of a number would be another one.
std::string_view cut(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  const std::size_t field = text.rfind(" | ", most);
  return text.substr(0, field == std::string_view::npos ? most : field);
}

}  // namespace

Console::Console(int fd)
    : fd_(fd),
      shows_status_(is_terminal(fd)),
      has_colour_(shows_status_ && is_empty("NO_COLOR")),
      writer_(fd, "stdout") {}

Console::~Console() { status(""); }

std::string Console::with_style(std::string_view text, Style style) const {
  if (!has_colour_ || style == Style::kPlain) return std::string(text);
  const std::size_t end = std::min({text.find(" | "), text.find('\n'), text.size()});
  std::string styled(style == Style::kStrong ? kStrong : kWarning);
  styled += text.substr(0, end);
  styled += kReset;
  styled += text.substr(end);
  return styled;
}

void Console::say(std::string_view text, Style style) {
  std::string out(status_.empty() ? "" : kEraseLine);
  out += with_style(text, style);
  out += "\n" + status_;
  writer_.write(std::move(out));
}

// A line of the whole width would make some terminals begin the next one.
std::optional<std::size_t> Console::columns() const {
  if (!shows_status_) return std::nullopt;
  winsize size{};
  const bool known = ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (known ? size.ws_col : 80u) - 1;
}

void Console::status(std::string_view text) {
  if (!shows_status_ || (text.empty() && status_.empty())) return;
  const auto now = std::chrono::steady_clock::now();
  if (!text.empty() && (now < next_status_ || !writer_.is_idle())) return;
  next_status_ = now + kStatusInterval;
  status_ = cut(text, columns().value_or(0));
  writer_.write(std::string(kEraseLine) + status_);
}

void Console::flush(const BackgroundWriter::Hurries& hurries) {
  status("");
  writer_.flush(hurries);
}

std::string progress_bar(double part, int width) {
  const int room = std::max(width - 2, 0);
  const int done = std::clamp(static_cast<int>(std::floor(part * room)), 0, room);
  std::string bar(static_cast<std::size_t>(room), ' ');
  std::fill_n(bar.begin(), done, '=');
  if (done < room) bar[static_cast<std::size_t>(done)] = '>';
  return "[" + bar + "]";
}

}  // namespace tessera::tools
