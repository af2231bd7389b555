// What a program tells on stdout: lines, and on a terminal a status line below them that is written
// again and again in its place. Written in the background: see background_writer.h.
//
//   Console console(STDOUT_FILENO);
//   console.say("step 1 ...");
//   console.status("[===>      ] 1/3");    // on a terminal alone; at most 10 times a second
//
// Elsewhere - a pipe, a file, TERM=dumb, under Open MPI - there is no status line and no colour.
// NO_COLOR that is not empty leaves colours out on a terminal too (https://no-color.org).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "tools/cli/background_writer.h"

namespace tessera::tools {

class Console {
 public:
  enum class Style { kPlain, kStrong, kWarning };

  /// `fd` stays the caller's, and open while this lives. Reads TERM, NO_COLOR and
  /// OMPI_COMM_WORLD_SIZE. Throws as BackgroundWriter.
  explicit Console(int fd);
  /// Takes the status line away, so that an error stands alone.
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// Writes `text` and a line break above the status line. `style` is for the first line, up to its
  /// first " | ". Never blocks; what is lost, error() and flush() tell.
  void say(std::string_view text, Style style = Style::kPlain);
  /// Makes `text` the status line; empty takes it away. What is wider than the terminal ends before
  /// a " | ", or where it must. `text` is ASCII without control characters. Left out where the
  /// terminal has not taken what was written before, or has had one less than 100 ms ago.
  void status(std::string_view text);
  bool shows_status() const { return shows_status_; }
  /// How many a line may take on the terminal; none elsewhere, where lines are not for eyes alone.
  std::optional<std::size_t> columns() const;

  std::optional<std::error_code> error() const { return writer_.error(); }
  /// Takes the status line away, and waits as BackgroundWriter::flush() does.
  void flush(const BackgroundWriter::Hurries& hurries);

 private:
  std::string with_style(std::string_view text, Style style) const;

  const int fd_;
  const bool shows_status_, has_colour_;
  std::string status_;  // as it is shown; empty: none
  std::chrono::steady_clock::time_point next_status_;
  BackgroundWriter writer_;
};

/// "[====>     ]" of `width` characters in all; `part` from 0 to 1.
std::string progress_bar(double part, int width);

}  // namespace tessera::tools
