"""What compiles .cu files: nvcc, or the host's compiler for a toolkit that stands in for the installed one."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@local_cuda//:defs.bzl", "CUDA_FOUND", "HOST_COMPILER", "NCCL_FOUND", "NVCC")

# --define=cuda_lines=1 adds the lines of sources, for profilers and compute-sanitizer; that doubles the machine code.
# Machine code for these, and PTX of the last for every later GPU. --define=cuda_archs=90,100 chooses others. What is for
# sm_90a stands in files of its own, NAME_sm90a.cu.
_ARCHS = "80,90"

NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "--compress-mode=size",
    "--expt-relaxed-constexpr",
    "-fmad=false",  # products and sums round as on the CPU, whatever was inlined; kernels ask for fma by name
    "-Xcompiler=-fPIC,-ffp-contract=off,-Wall",
    "-DFMT_USE_CONSTEXPR=1",  # fmt 9 takes nvcc for a compiler without, and then its own consteval fails
]

def if_cuda(value, otherwise = []):
    """`value` when the build found a CUDA toolkit."""
    return value if CUDA_FOUND else otherwise

def if_nccl(value, otherwise = []):
    """`value` when the toolkit has NCCL's header, which is a package of its own."""
    return value if NCCL_FOUND else otherwise

CudaToolkitInfo = provider(
    doc = "How .cu files are compiled.",
    fields = {"device_header": "string: what they include first, as C++ for the host's compiler; empty: nvcc compiles them"},
)

def _cuda_toolkit_impl(ctx):
    return [
        cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]),
        CudaToolkitInfo(device_header = ctx.attr.device_header),
    ]

# What CUDA sources are compiled for and linked with.
cuda_toolkit = rule(
    implementation = _cuda_toolkit_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo], doc = "The runtime and the other libraries."),
        "device_header": attr.string(doc = "As in CudaToolkitInfo."),
    },
)

_TOOLKIT = attr.label(
    default = "//third_party/cuda:toolkit",
    providers = [CcInfo, CudaToolkitInfo],
)

def _gencode(archs):
    flags = ["-gencode=arch=compute_{0},code=sm_{0}".format(arch) for arch in archs]
    if archs[-1].endswith("a"):
        return flags
    return flags + ["-gencode=arch=compute_{0},code=compute_{0}".format(archs[-1])]

def _archs(ctx, source):
    """What `source` is compiled for. Code of sm_90a runs there alone, and has no PTX for what comes later."""
    if source.basename.endswith("_sm90a.cu"):
        return ["90a"]
    return ctx.var.get("cuda_archs", _ARCHS).split(",")

def _arguments(ctx, context):
    """What every compilation by nvcc is given. The toolkit's own headers are found by nvcc itself."""
    root = ctx.label.workspace_root or "."
    arguments = ctx.actions.args()
    arguments.add_all(["-ccbin", HOST_COMPILER])
    arguments.add_all(NVCC_FLAGS)
    if not ctx.label.workspace_root:
        arguments.add("--Werror=all-warnings")
    if ctx.var.get("cuda_lines") == "1":
        arguments.add("-lineinfo")
    arguments.add_all(depset([root], transitive = [context.quote_includes, context.includes]), before_each = "-I")
    arguments.add_all(context.system_includes, before_each = "-isystem")
    arguments.add_all(depset(ctx.attr.local_defines, transitive = [context.defines]), format_each = "-D%s")
    return arguments

def _compile(ctx, source, context, headers):
    """The object file."""
    object = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, source.basename))
    arguments = _arguments(ctx, context)
    arguments.add_all(["-c", source, "-o", object])
    arguments.add_all(_gencode(_archs(ctx, source)))
    ctx.actions.run(
        executable = NVCC,
        arguments = [arguments],
        inputs = depset([source], transitive = [headers]),
        outputs = [object],
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s" % source.short_path,
        use_default_shell_env = True,
    )
    return object

def _report_resources(ctx, source, context, headers):
    """What ptxas says of each kernel, for the last architecture. An action of its own, which runs when it is asked for."""
    report = ctx.actions.declare_file("_objs/%s/%s.ptxas" % (ctx.label.name, source.basename))
    machine_code = ctx.actions.declare_file("_objs/%s/%s.cubin" % (ctx.label.name, source.basename))
    arguments = _arguments(ctx, context)
    arguments.add_all(["-cubin", source, "-o", machine_code, "-arch=sm_" + _archs(ctx, source)[-1], "-Xptxas=-v"])
    ctx.actions.run_shell(
        command = "report=$1; shift; \"$@\" 2>\"$report\" || { status=$?; cat \"$report\" >&2; exit $status; }",
        arguments = [report.path, NVCC, arguments],
        inputs = depset([source], transitive = [headers]),
        outputs = [report, machine_code],
        mnemonic = "CudaResources",
        progress_message = "Compiling %s for its registers" % source.short_path,
        use_default_shell_env = True,
    )
    return struct(source = source.short_path, report = report)

KernelReportsInfo = provider(
    doc = "What ptxas says of the kernels of .cu files.",
    fields = {"reports": "depset of struct(source, report): the .cu file's path, and a file"},
)

def _compile_on_host(ctx, device_header):
    """The object files of all sources, each from a .cc that includes it."""
    toolchain = find_cpp_toolchain(ctx)
    sources = []
    for source in ctx.files.srcs:
        output = ctx.actions.declare_file(source.basename + ".cc")
        ctx.actions.write(output, """\
// NOLINTNEXTLINE(misc-include-cleaner): what nvcc includes of its own accord
#include "%s"
#include "%s"
""" % (device_header, source.short_path))
        sources.append(output)
    _, outputs = cc_common.compile(
        name = ctx.label.name,
        actions = ctx.actions,
        feature_configuration = cc_common.configure_features(
            ctx = ctx,
            cc_toolchain = toolchain,
            requested_features = ctx.features,
            unsupported_features = ctx.disabled_features,
        ),
        cc_toolchain = toolchain,
        srcs = sources,
        additional_inputs = ctx.files.hdrs + ctx.files.srcs,
        compilation_contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps + [ctx.attr._toolkit]],
        local_defines = ctx.attr.local_defines,
        user_compile_flags = ctx.attr.copts,
    )
    return outputs.pic_objects or outputs.objects

def _cuda_objects_impl(ctx):
    device_header = ctx.attr._toolkit[CudaToolkitInfo].device_header
    if device_header:
        return [DefaultInfo(files = depset(_compile_on_host(ctx, device_header)))]
    deps = ctx.attr.deps + [ctx.attr._toolkit]
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in deps]).compilation_context
    headers = depset(ctx.files.hdrs, transitive = [context.headers])
    objects = [_compile(ctx, source, context, headers) for source in ctx.files.srcs]
    reports = [_report_resources(ctx, source, context, headers) for source in ctx.files.srcs]
    return [DefaultInfo(files = depset(objects)), KernelReportsInfo(reports = depset(reports))]

# The object files of .cu sources, to stand in the srcs of a cc_library. Only where if_cuda() says so.
cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = True, doc = "Every header and .cuh of the same library."),
        "deps": attr.label_list(providers = [CcInfo]),
        "local_defines": attr.string_list(),
        "copts": attr.string_list(doc = "Of the host's compiler, where that is what compiles them."),
        "_toolkit": _TOOLKIT,
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def _linked_toolkit_impl(ctx):
    toolkit = ctx.attr._toolkit
    loaders = [] if toolkit[CudaToolkitInfo].device_header else ctx.attr.loaders
    infos = [dep[CcInfo] for dep in [toolkit] + loaders]
    return [CcInfo(linking_context = cc_common.merge_cc_infos(cc_infos = infos).linking_context)]

# The toolkit as it is linked, without its headers.
linked_toolkit = rule(
    implementation = _linked_toolkit_impl,
    attrs = {
        "loaders": attr.label_list(providers = [CcInfo], doc = "What loads libraries of the installed toolkit. Another toolkit links its own."),
        "_toolkit": _TOOLKIT,
    },
)

def _missing_impl(ctx):
    fail(ctx.attr.text)

# A dependency that stops the build and says why.
missing = rule(
    implementation = _missing_impl,
    attrs = {"text": attr.string()},
)

AllKernelReportsInfo = provider(
    doc = "The same of all that a target leans on.",
    fields = {"reports": "as in KernelReportsInfo"},
)

def _all_kernel_reports_impl(target, ctx):
    found = [target[KernelReportsInfo].reports] if KernelReportsInfo in target else []
    for name in ["srcs", "deps"]:
        for dep in getattr(ctx.rule.attr, name, None) or []:
            if AllKernelReportsInfo in dep:
                found.append(dep[AllKernelReportsInfo].reports)
    return [AllKernelReportsInfo(reports = depset(transitive = found))]

_all_kernel_reports = aspect(
    implementation = _all_kernel_reports_impl,
    attr_aspects = ["srcs", "deps"],
)

def _kernel_reports_impl(ctx):
    """One file: nvcc's version, and after a line "file PATH" what ptxas says of it. Empty where nvcc compiles nothing."""
    found = depset(transitive = [dep[AllKernelReportsInfo].reports for dep in ctx.attr.deps]).to_list()
    output = ctx.actions.declare_file(ctx.label.name + ".txt")
    commands = ["%s --version" % NVCC] if found else []
    for item in found:
        commands += ["echo 'file %s'" % item.source, "cat '%s'" % item.report.path]
    ctx.actions.run_shell(
        command = "{ %s; } >'%s'" % ("; ".join(commands or [":"]), output.path),
        inputs = [item.report for item in found],
        outputs = [output],
        mnemonic = "KernelReports",
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output]))]

# What the compiler says of every kernel that `deps` lean on, for //tools:kernel_report.
kernel_reports = rule(
    implementation = _kernel_reports_impl,
    attrs = {"deps": attr.label_list(aspects = [_all_kernel_reports])},
)
