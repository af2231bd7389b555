"""The external repositories of Tessera. Nothing is fetched: each stands for a package of the operating system.

A workspace that uses Tessera calls tessera_deps() as well; what it has defined before that call is kept.
"""

load("//third_party:system.bzl", "system_repository")
load("//third_party/cuda:configure.bzl", "cuda_configure")
load("//third_party/gloo:configure.bzl", "gloo_configure")
load("//third_party/mpi:configure.bzl", "mpi_configure")

_INCLUDE = "/usr/include/"

# Keyword arguments of system_repository, by name.
_LIBRARIES = {
    "bible_kjv": dict(
        package = "bible-kjv bible-kjv-text",
        links = {
            "/usr/bin/bible": "bible",
            "/usr/lib/bible.data": "bible.data",
        },
    ),
    "eigen": dict(
        package = "libeigen3-dev",
        links = {
            _INCLUDE + "eigen3/Eigen": "Eigen",
            _INCLUDE + "eigen3/unsupported": "unsupported",
        },
    ),
    "fashion_mnist": dict(
        package = "dataset-fashion-mnist",
        links = {"/usr/share/datasets/fashion-mnist": "data"},
    ),
    "fmt": dict(
        package = "libfmt-dev",
        links = {_INCLUDE + "fmt": "include/fmt"},
    ),
    "googletest": dict(
        package = "googletest",
        links = {
            "/usr/src/googletest/googlemock": "googlemock",
            "/usr/src/googletest/googletest": "googletest",
        },
    ),
    "icu": dict(
        package = "libicu-dev",
        links = {_INCLUDE + "unicode": "include/unicode"},
    ),
    "nlohmann_json": dict(
        package = "nlohmann-json3-dev",
        links = {_INCLUDE + "nlohmann": "include/nlohmann"},
    ),
    "onednn": dict(
        package = "libdnnl-dev",
        links = {_INCLUDE + "oneapi/dnnl": "include/oneapi/dnnl"},
    ),
    "openblas": dict(
        package = "libopenblas-pthread-dev",
        links = {_INCLUDE + "{triplet}/openblas-pthread": "include"},
    ),
    "openssl": dict(
        package = "libssl-dev",
        links = {
            _INCLUDE + "openssl": "include/openssl",
            _INCLUDE + "{triplet}/openssl": "machine/openssl",
        },
    ),
    "pcre2": dict(
        package = "libpcre2-dev",
        links = {_INCLUDE + "pcre2.h": "include/pcre2.h"},
    ),
    "tomlplusplus": dict(
        package = "libtomlplusplus-dev",
        links = {_INCLUDE + "toml++": "include/toml++"},
    ),
    "xxhash": dict(
        package = "libxxhash-dev",
        links = {_INCLUDE + "xxhash.h": "include/xxhash.h"},
    ),
    "zlib": dict(
        package = "zlib1g-dev",
        links = {
            _INCLUDE + "zconf.h": "include/zconf.h",
            _INCLUDE + "zlib.h": "include/zlib.h",
        },
    ),
}

def system_libraries(known = []):
    """Defines the libraries, data sets, the CUDA toolkit and Gloo, but for those named in `known`."""
    for name, arguments in _LIBRARIES.items():
        if name not in known:
            system_repository(
                name = name,
                files = {Label("//third_party/sys:%s.BUILD" % name): "BUILD"},
                **arguments
            )
    if "local_cuda" not in known:
        cuda_configure(name = "local_cuda")
    if "local_gloo" not in known:
        gloo_configure(name = "local_gloo")
    if "local_mpi" not in known:
        mpi_configure(name = "local_mpi")

def _bazel_4_rules(known):
    """What Bazel 4 would fetch by itself before it can build its first C++ target."""
    if "rules_cc" not in known:
        system_repository(
            name = "rules_cc",
            files = {
                Label("//third_party/rules_cc:cc.BUILD"): "cc/BUILD",
                Label("//third_party/rules_cc:defs.bzl"): "cc/defs.bzl",
            },
        )
    if "remote_coverage_tools" not in known:
        system_repository(
            name = "remote_coverage_tools",
            files = {Label("//third_party/coverage_tools:coverage_tools.BUILD"): "BUILD"},
        )
    for name in ["rules_java", "rules_proto"]:
        if name not in known:
            native.local_repository(
                name = name,
                path = "/usr/share/bazel/rules/" + name[len("rules_"):],
            )

def tessera_deps():
    known = native.existing_rules().keys()
    _bazel_4_rules(known)
    system_libraries(known)
