"""Build the wheels: one for Python 3.11, one for 3.12 and newer, one without C++.

Zig's C++ compiler, which pip installs, links against any glibc. So the wheels run where
glibc is 2.28 or newer, whatever this machine has, and need no library of a compiler.
"""

import argparse
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import ziglang
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

from release import environments as env

DIST = env.ROOT / "dist"
GLIBC = "2.28"
PLATFORM = "manylinux_2_28_x86_64"
# The wheel for all other systems, in which XLA communicates.
WITHOUT_EXTENSION = "py3-none-any"


def builders() -> dict[str, Path]:
    """Return the interpreters that wheels are built with, by their wheel's tag.

    From 3.12 on a wheel is for all later versions, so the oldest of them builds it.
    """
    found = env.interpreters()
    tags = {"cp311": ["3.11"], "cp312-abi3": [v for v in found if v != "3.11"]}
    return {
        tag: found[versions[0]]
        for tag, versions in tags.items()
        if versions and versions[0] in found
    }


def compiler() -> Path:
    """Write a program that compiles with Zig for an old glibc; return its path."""
    zig = Path(ziglang.__file__).with_name("zig")
    program = env.WORK / "zig-c++"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f'#!/bin/sh\nexec "{zig}" c++ -target x86_64-linux-gnu.{GLIBC} "$@"\n'
    )
    program.chmod(0o755)
    return program


def build(tag: str, interpreter: Path) -> Path:
    """Build a wheel against the oldest jaxlib; return it, tagged for old systems."""
    requires = env.PROJECT["build-system"]["requires"]
    built = _build(
        tag,
        interpreter,
        [*requires, "cmake", "ninja"],
        [f"--config-settings=build-dir={env.WORK / 'objects' / tag}"],
        CXX=str(compiler()),
        # nanobind 3.1 uses stderr, and leaves its header to the C++ library.
        # -O3: without it CMake's first program is a debug build, for which Zig builds
        # its C++ library once more.
        CXXFLAGS="-O3 -include cstdio",
        PATH=os.environ["PATH"],
    )
    auditwheel = [sys.executable, "-m", "auditwheel"]
    # It fails if the wheel needs anything newer than the platform has.
    env.run([*auditwheel, "repair", "--plat", PLATFORM, "-w", DIST, built])
    wheel = newest(tag)
    env.run([*auditwheel, "show", wheel])
    claimed = [v for v in env.supported() if (v == "3.11") == (tag == "cp311")]
    if refused := [version for version in claimed if not is_for(wheel.name, version)]:
        raise SystemExit(f"pip would not install {wheel.name} for Python {refused}")
    if "abi3" in tag:
        # Whether newer versions of Python, here or not, have all that it calls.
        env.run([sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel])
    return wheel


def build_without_extension() -> Path:
    """Build the wheel without the extension, where PATH has no compiler; return it."""
    requires = env.PROJECT["build-system"]["requires"]
    built = _build(
        WITHOUT_EXTENSION,
        Path(sys.executable),
        [each for each in requires if not each.startswith(("jaxlib", "nanobind"))],
        PATH="/nowhere",
        JAXCOMM_NO_EXTENSION="1",
    )
    if faults := list(faults_without_extension(built)):
        raise SystemExit(f"{built.name}: {'; '.join(faults)}")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(built, DIST))


def faults_without_extension(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the contents of a wheel without the extension."""
    if not wheel.name.endswith(f"-{WITHOUT_EXTENSION}.whl"):
        yield f"its tag is not {WITHOUT_EXTENSION}"
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
    package = env.ROOT / "jaxcomm"
    expected = {
        path.relative_to(env.ROOT).as_posix()
        for path in package.rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }
    expected.add("jaxcomm/_without_extension.py")
    found = {name for name in inside if ".dist-info/" not in name}
    for name in sorted(expected ^ found):
        yield f"{name} is {'missing' if name in expected else 'there'}"


def _build(tag, interpreter, requires, options=(), **variables) -> Path:
    """Build one wheel in an environment of its own; return it."""
    folder, raw = env.WORK / f"build-{tag}", env.WORK / f"wheel-{tag}"
    python = folder / "bin" / "python"
    if not python.exists():
        python = env.make(folder.name, interpreter)
        env.install(python, *requires)
    shutil.rmtree(raw, ignore_errors=True)
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"
    env.run(
        [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-build-isolation", "--wheel-dir", raw, *options, env.ROOT],
        env=os.environ | variables,
    )  # fmt: skip
    (built,) = raw.glob("*.whl")
    return built


def is_for(wheel: str, version: str) -> bool:
    """Return whether pip installs a wheel of this name for a version of Python.

    It goes by tags alone: this machine need not have the version.
    """
    major, minor = map(int, version.split("."))
    taken = cpython_tags((major, minor), platforms=[PLATFORM])
    return not parse_wheel_filename(wheel)[-1].isdisjoint(taken)


def newest(tag: str) -> Path:
    """Return the wheel in ``dist`` that was written last."""
    found = sorted(DIST.glob(f"*-{tag}*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"no wheel {tag} in {DIST}: make wheel")
    return found[-1]


def main() -> None:
    """Build the wheels that this machine has the Python for."""
    parser = argparse.ArgumentParser(prog="make wheel", description=__doc__)
    tags = f"cp311, cp312-abi3 or {WITHOUT_EXTENSION}"
    parser.add_argument("--only", metavar="TAG", help=tags)
    only = parser.parse_args().only
    chosen = {t: p for t, p in builders().items() if only in (None, t)}
    if not chosen and only != WITHOUT_EXTENSION:
        raise SystemExit(f"no interpreter for {only}; found {env.interpreters()}")
    for tag, interpreter in chosen.items():
        print(build(tag, interpreter))
    if only in (None, WITHOUT_EXTENSION):
        print(build_without_extension())


if __name__ == "__main__":
    main()
