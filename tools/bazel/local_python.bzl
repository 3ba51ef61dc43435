"""A repository made from the Python that builds us: headers, nanobind, interpreter."""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# `includes` makes them system headers: their warnings are not ours.
cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/xla/ffi/api/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    textual_hdrs = glob(
        ["nanobind/src/*", "nanobind/ext/**/*.h"],
        exclude = ["nanobind/src/nb_combined.cpp"],
        allow_empty = True,
    ),
    copts = ["-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    deps = [":python"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "%{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# jaxlib's folder and not jax.ffi.include_dir(): the same, without importing jax.
_PROBE = """
import importlib.util, sys, sysconfig
def folder(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        sys.exit(f"{sys.executable} has no {package}: pip install jax jaxlib nanobind, "
                 "or set PYTHON to an interpreter that has them")
    return spec.submodule_search_locations[0]
print(sys.executable)
print(sysconfig.get_path("include"))
print(folder("jaxlib") + "/include")
print(folder("nanobind"))
"""

def _local_python_impl(repository_ctx):
    python = repository_ctx.os.environ.get("PYTHON", "python3")
    path = repository_ctx.which(python) if "/" not in python else repository_ctx.path(python)
    if path == None:
        fail("no Python interpreter '%s': set PYTHON" % python)
    probe = repository_ctx.execute([path, "-c", _PROBE])
    if probe.return_code != 0:
        fail("%s: %s" % (path, probe.stderr))
    interpreter, python_include, jaxlib_include, nanobind = probe.stdout.strip().split("\n")

    repository_ctx.symlink(python_include, "python")
    repository_ctx.symlink(jaxlib_include, "jaxlib")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.file("BUILD", _BUILD.replace("%{interpreter}", interpreter))

local_python = repository_rule(
    implementation = _local_python_impl,
    doc = "Headers of Python, jaxlib and nanobind as $PYTHON has them, and its toolchain.",
    environ = ["PYTHON"],
    local = True,
)
