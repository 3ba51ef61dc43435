"""Compare the licences in the wheels with what the compiler put into them.

The compiler's record of the headers that it read says whose code is compiled in. A
header that belongs to no component below fails the check.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import ziglang

from release import environments as env
from release import wheels

FOLDER = env.ROOT / "licenses"


def _top_of(path: str) -> Callable[[Path], str]:
    """Return a reader of the comment at the top of a header: it has no other file."""

    def read(packages: Path) -> str:
        comment = (packages / path).read_text().split("*/")[0]
        return re.sub(r"^ ?/?\*+ ?|^=+$", "", comment, flags=re.M)

    return read


def _file(pattern: str) -> Callable[[Path], str]:
    def read(packages: Path) -> str:
        (found,) = packages.glob(pattern)
        return found.read_text()

    return read


def _of_zig(path: str) -> Callable[[Path], str]:
    return lambda _: (Path(ziglang.__file__).parent / path).read_text()


# A component: where its headers lie, and how to read its licence where it is installed.
# The first pattern that fits a header names its component.
COMPONENTS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "robin_map": (
        "/nanobind/ext/robin_map/",
        _top_of("nanobind/ext/robin_map/include/tsl/robin_map.h"),
    ),
    "nanobind": ("/nanobind/", _file("nanobind-*.dist-info/licenses/LICENSE")),
    # Apache-2.0, as our own LICENSE.
    "xla": ("/jaxlib/include/xla/", _top_of("jaxlib/include/xla/ffi/api/c_api.h")),
    # libc++, libc++abi and libunwind are linked in, and so is Zig's compiler-rt.
    "llvm": ("/ziglang/lib/(libcxx|include)", _of_zig("lib/libcxx/LICENSE.TXT")),
    "zig": ("/ziglang/", _of_zig("LICENSE")),
}
# Interfaces of what the wheel finds at run time.
OTHERS = "/ziglang/lib/libc/include/|/include/python3"


def component(header: str) -> str | None:
    """Return the component that a header belongs to; None: nothing is compiled in.

    Raises:
      SystemExit: it belongs to none that is known.
    """
    if re.search(OTHERS, header) or Path(header).is_relative_to(env.ROOT / "ffi"):
        return None
    for name, (pattern, _) in COMPONENTS.items():
        if re.search(pattern, header):
            return name
    raise SystemExit(f"{header}: whose is it? Add its licence to {__file__}")


def compiled_in(tag: str) -> set[str]:
    """Return the components of a wheel's extension, from the record of its build."""
    objects = env.WORK / "objects" / tag
    ninja = env.WORK / f"build-{tag}" / "bin" / "ninja"
    record = subprocess.check_output([ninja, "-t", "deps"], cwd=objects, text=True)
    listed = {line.strip() for line in record.splitlines() if line.startswith(" ")}
    headers = {str((objects / each).resolve()) for each in listed}
    # What CMake writes into the build folder only includes others.
    others = {h for h in headers if not Path(h).is_relative_to(objects.resolve())}
    if not others:
        raise SystemExit(f"{objects} has no record of a build: make wheel")
    return {found for header in others if (found := component(header))} | {"zig"}


def faults(tag: str, write: bool = False) -> list[str]:
    """Return what is wrong with the licences of a wheel."""
    found = []
    (packages,) = (env.WORK / f"build-{tag}" / "lib").glob("python3.*/site-packages")
    with zipfile.ZipFile(wheels.newest(tag)) as wheel:
        inside = {
            Path(name).name: wheel.read(name).decode()
            for name in wheel.namelist()
            if ".dist-info/licenses/" in name
        }
    for name in sorted(compiled_in(tag)):
        text, file = COMPONENTS[name][1](packages).strip() + "\n", f"{name}.txt"
        if write:
            (FOLDER / file).write_text(text)
        if inside.get(file) != text:
            found.append(f"{tag}: {file} is missing or is not {name}'s licence")
        print(f"{tag}: {name}, {len(text)} characters")
    own = (env.ROOT / "LICENSE").read_text()
    if inside.get("LICENSE") != own:
        found.append(f"{tag}: our own LICENSE is missing")
    return found


def main() -> int:
    """Print what is wrong; return 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="release.licences", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {FOLDER}")
    write = parser.parse_args().write
    FOLDER.mkdir(exist_ok=True)
    found = [fault for tag in wheels.builders() for fault in faults(tag, write)]
    print("\n".join(found) or "every licence is in the wheels")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
