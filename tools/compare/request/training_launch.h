// compare --launch: the words that start each training as several processes.
//
// [Note: what a launcher starts] Ranks, plans and memory depend on how many processes there will be
// on how many hosts, and no launcher says so before it has started them. So its words start this
// program once ahead of all trainings, and its process 0 tells.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/compare/request/training_process.h"
#include "tools/config/launcher_choice.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {

struct TrainingLaunch {
  LauncherWords words = {};
  Launch launch = {};  ///< of process 0
};

/// The words of a command: with spaces between them, or in single or double quotes. Throws
/// InvalidArgument for a quote without its end, or no word.
std::vector<std::string> words_of(std::string_view text);

/// What `text` starts; nothing if it is empty. Throws InvalidArgument if it is no command, or
/// starts no processes that know of each other; IoError for a program that is not there.
TrainingLaunch ask_launcher(std::string_view text);

/// The only argument of this program where ask_launcher() has started it.
inline constexpr std::string_view kTellLaunch = "--tell-launch";
/// Says on stdout, in process 0 of those that ask_launcher() has started, how many there are and on
/// how many hosts.
void tell_launch();

/// Trainings of a process that a launcher has started would take part in what it was started for,
/// or wait for others to join them. Throws InvalidArgument for one of several, heeding the
/// environment as `choice` asks for.
void check_started_alone(LauncherChoice choice);

}  // namespace tessera::tools
