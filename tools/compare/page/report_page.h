// The page of a comparison: one HTML file without any other, for people to look at and pass on.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::tools {

/// Text as HTML shows it, in elements and in quoted attributes.
std::string html_escaped(std::string_view text);

/// `comparison`: to_json(). `steps`: steps_to_show(). Below 2 MB
/// whatever the number of steps: losses are thinned, keeping the largest difference of those left
/// out.
std::string report_page(const nlohmann::ordered_json& comparison,
                        const nlohmann::ordered_json& steps);

}  // namespace tessera::tools
