"""Finds Gloo, or its absence.

Its headers are looked for in /usr/include/gloo (Debian: libgloo-dev). Without them, or with NO_GLOO=1, everything but the
plug-in that uses Gloo is built.

    @local_gloo//:gloo      the library; where there is none, nothing
    @local_gloo//:defs.bzl  GLOO_FOUND
"""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "gloo",
    hdrs = glob(["include/**/*.h", "missing/**/*.h"], allow_empty = True),
    includes = [
        "include",
        "missing",
    ],
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _gloo_configure_impl(ctx):
    headers = ctx.path("/usr/include/gloo")
    found = headers.get_child("config.h").exists and ctx.os.environ.get("NO_GLOO", "0") in ["", "0"]
    if found:
        ctx.symlink(headers, "include/gloo")
        ctx.symlink(Label("//third_party/gloo:memory.h"), "missing/gloo/common/memory.h")
    ctx.file("defs.bzl", "GLOO_FOUND = %s\n" % found)
    ctx.file("BUILD", _BUILD.format(linkopts = ["-lgloo"] if found else []))

gloo_configure = repository_rule(
    implementation = _gloo_configure_impl,
    environ = ["NO_GLOO"],
    configure = True,
    local = True,
)
