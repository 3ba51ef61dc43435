"""Build the wheels: one for Python 3.11, one for 3.12 and newer.

Zig's C++ compiler, which pip installs, links against any glibc. So the wheels run where
glibc is 2.28 or newer, whatever this machine has, and need no library of a compiler.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import ziglang
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

from release import environments as env

DIST = env.ROOT / "dist"
GLIBC = "2.28"
PLATFORM = "manylinux_2_28_x86_64"


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
    program.write_text(
        f'#!/bin/sh\nexec "{zig}" c++ -target x86_64-linux-gnu.{GLIBC} "$@"\n'
    )
    program.chmod(0o755)
    return program


def build(tag: str, interpreter: Path) -> Path:
    """Build a wheel against the oldest jaxlib; return it, tagged for old systems."""
    folder, raw = env.WORK / f"build-{tag}", env.WORK / f"wheel-{tag}"
    requires = env.PROJECT["build-system"]["requires"]
    python = folder / "bin" / "python"
    if not python.exists():
        python = env.make(folder.name, interpreter)
        env.install(python, *requires, "cmake", "ninja")
    shutil.rmtree(raw, ignore_errors=True)
    env.run(
        [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-build-isolation", "--wheel-dir", raw,
         f"--config-settings=build-dir={env.WORK / 'objects' / tag}", env.ROOT],
        env=dict(
            os.environ,
            CXX=str(compiler()),
            # nanobind 3.1 uses stderr, and leaves its header to the C++ library.
            CXXFLAGS="-include cstdio",
            PATH=f"{python.parent}:{os.environ['PATH']}",
        ),
    )  # fmt: skip
    (built,) = raw.glob("*.whl")
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
    parser.add_argument("--only", metavar="TAG", help="cp311 or cp312-abi3")
    only = parser.parse_args().only
    chosen = {t: p for t, p in builders().items() if only in (None, t)}
    if not chosen:
        raise SystemExit(f"no interpreter for {only}; found {env.interpreters()}")
    for tag, interpreter in chosen.items():
        print(build(tag, interpreter))


if __name__ == "__main__":
    main()
