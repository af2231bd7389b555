// The files of the page, in the program.
#pragma once

#include <string_view>

namespace tessera::tools {

extern const std::string_view kReportHtml, kReportCss, kReportScript;

}  // namespace tessera::tools
