"""Only MODULE.bazel loads this: Bazel 4.2.3 knows no module_extension."""

load(":local_python.bzl", "local_python")

def _local_python_extension_impl(_module_ctx):
    local_python(name = "local_python")

local_python_extension = module_extension(implementation = _local_python_extension_impl)
