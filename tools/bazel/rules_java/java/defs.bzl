"""Stand-in for rules_java: what Bazel 4's own BUILD files load, never built by us."""

java_binary = native.java_binary
java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
