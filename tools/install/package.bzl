"""tessera_package: what an installation of a library is made of, for those who build without Bazel."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("//third_party/cuda:defs.bzl", "CudaToolkitInfo", "NVCC_FLAGS")

_Library = provider(
    doc = "What is asked of each library of this repository.",
    fields = {
        "headers": "depset: its public headers, or, of one that has none and only collects others, theirs",
        "flags": "list: how it is compiled",
    },
)

def _library_impl(target, ctx):
    headers = depset(target[CcInfo].compilation_context.direct_public_headers) if CcInfo in target else depset()
    if not headers.to_list():
        headers = depset(transitive = [dep[_Library].headers for dep in getattr(ctx.rule.attr, "deps", []) if _Library in dep])
    flags = getattr(ctx.rule.attr, "copts", [])
    for dep in getattr(ctx.rule.attr, "deps", []):
        if not flags and _Library in dep:
            flags = dep[_Library].flags
    return [_Library(headers = headers, flags = flags)]

_library = aspect(
    implementation = _library_impl,
    attr_aspects = ["deps"],
)

def _own(ctx, files):
    return [file for file in files.to_list() if file.owner.workspace_root == ctx.label.workspace_root]

def _unique(values):
    return {value: None for value in values}.keys()

def _package_impl(ctx):
    info = cc_common.merge_cc_infos(cc_infos = [library[CcInfo] for library in ctx.attr.libraries])

    archives, linkopts = [], []
    for linked in info.linking_context.linker_inputs.to_list():
        linkopts += linked.user_link_flags
        archives += [library.pic_static_library or library.static_library for library in linked.libraries]
    archive = ctx.actions.declare_file("libtessera.a")
    script = ctx.actions.declare_file(ctx.label.name + ".mri")
    ctx.actions.write(script, "\n".join(
        ["CREATE " + archive.path] + ["ADDLIB " + part.path for part in archives] + ["SAVE", "END", ""],
    ))
    command = '"$1" -M <"$2"'
    if ctx.attr._toolkit[CudaToolkitInfo].device_header:
        command = "echo '[install] expected the installed CUDA toolkit, got one that stands in for it' >&2; exit 1"
    ctx.actions.run_shell(
        command = command,
        arguments = [find_cpp_toolchain(ctx).ar_executable, script.path],
        inputs = depset([script] + archives, transitive = [find_cpp_toolchain(ctx).all_files]),
        outputs = [archive],
        mnemonic = "MergeArchives",
    )

    # Variables of the shell; one value a line where there are several.
    facts = ctx.actions.declare_file(ctx.label.name + ".facts")
    roots = depset(transitive = [library[_Library].headers for library in ctx.attr.libraries])
    flags = ctx.attr.libraries[0][_Library].flags
    ctx.actions.write(facts, "".join(["%s='%s'\n" % (name, "\n".join(values)) for name, values in {
        "headers": [header.short_path for header in _own(ctx, roots)],
        "defines": [define for define in info.compilation_context.defines.to_list() if define.startswith("TESSERA_")],
        "linkopts": _unique(linkopts),
        "contraction": [flag for flag in flags if flag.startswith("-ffp-contract=")],
        "machine": [flag for flag in flags if flag.startswith("-march=")],
        "device_flags": [flag for flag in NVCC_FLAGS if flag.startswith(("--expt-", "-fmad=", "-D"))],  # that public .cuh need
    }.items()]))

    files = [archive, facts] + _own(ctx, info.compilation_context.headers)
    return [DefaultInfo(files = depset([archive, facts]), runfiles = ctx.runfiles(files = files))]

tessera_package = rule(
    implementation = _package_impl,
    attrs = {
        "libraries": attr.label_list(providers = [CcInfo], aspects = [_library], doc = "Those whose headers are installed."),
        "_toolkit": attr.label(default = "//third_party/cuda:toolkit"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    doc = "libtessera.a (position independent), NAME.facts for install.sh, and every header as a runfile.",
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
