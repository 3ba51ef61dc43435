"""``thread_safety.py FOLDER``: clang's thread-safety analysis of ffi/.

Only clang reads the annotations of ffi/os/mutex.h. It analyses the files that changed
since the analysis last passed, and all files if a header changed. FOLDER holds the time
of that. It also holds the headers that most files include, compiled once.
"""

import concurrent.futures
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

_COMPILER = os.environ.get("CLANGXX", "clang++")
_FLAGS = ["-std=c++17", "-pthread", "-Wthread-safety", "-Werror=thread-safety", "-I."]
_INCLUDED_BY_MOST = (
    "algorithm", "atomic", "chrono", "condition_variable", "functional", "map",
    "memory", "mutex", "optional", "string", "thread", "unordered_map", "vector",
    "xla/ffi/api/ffi.h",
)  # fmt: skip


def _include_flags():
    import nanobind

    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None
    assert jaxlib.origin is not None
    folders = (
        str(pathlib.Path(jaxlib.origin).with_name("include")),
        nanobind.include_dir(),
        sysconfig.get_path("include"),
    )
    return [word for folder in folders for word in ("-isystem", folder)]


def _changed(since: pathlib.Path) -> list[str]:
    """Return the files to analyse."""
    sources = sorted(pathlib.Path("ffi").rglob("*.cc"))
    if not since.exists():
        return list(map(str, sources))
    passed = since.stat().st_mtime_ns
    others = [p for p in pathlib.Path("ffi").rglob("*.*") if p.suffix != ".cc"]
    if any(p.stat().st_mtime_ns > passed for p in (pathlib.Path(__file__), *others)):
        return list(map(str, sources))
    return [str(p) for p in sources if p.stat().st_mtime_ns > passed]


def main(folder: pathlib.Path) -> int:
    """Return 0 if all is well, or there is no clang; print what is not."""
    if shutil.which(_COMPILER) is None:
        print(f"no {_COMPILER}: the thread-safety analysis is skipped")
        return 0
    passed = folder / "passed"
    files = _changed(passed)
    print(f"{_COMPILER}: thread-safety analysis of {len(files)} files")
    if not files:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder / "begun"
    begun.touch()
    command = [_COMPILER, *_FLAGS, *_include_flags()]
    header, compiled = folder / "most.h", folder / "most.pch"
    header.write_text("".join(f"#include <{name}>\n" for name in _INCLUDED_BY_MOST))
    subprocess.run([*command, "-x", "c++-header", header, "-o", compiled], check=True)
    command += ["-fsyntax-only", "-include-pch", compiled]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        statuses = list(
            pool.map(lambda file: subprocess.run([*command, file]).returncode, files)
        )
    if any(statuses):
        return 1
    begun.replace(passed)
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
