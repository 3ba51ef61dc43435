"""Compile the GPU code, kernels.cu, to the PTX that the package carries.

Writes ffi/backends/nccl/kernels/kernels_ptx.inc. Needs no GPU and no CUDA toolkit: the
compiler is NVRTC, of the wheel that the extra `ptx` of pyproject.toml pins. Another
version of it writes other PTX. NVRTC 12.0 writes PTX ISA 8.0, which drivers of CUDA
12.0 and newer take (525.60). NVRTC of CUDA 13 no longer compiles for sm_70.

`make ptx` installs the wheel into build/nvrtc and runs this; `make lint` runs --check.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "ffi/backends/nccl/kernels"
SOURCE = f"{FOLDER}/kernels.cu"
HEADERS = tuple(
    f"{FOLDER}/{name}"
    for name in (
        "kernels.h",
        "exchange_device.h",
        "instructions.h",
        "one_shot_device.h",
        "ragged.h",
        "ragged_device.h",
        "word_sums.h",
    )
)
OUTPUT = f"{FOLDER}/kernels_ptx.inc"

(REQUIREMENT,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]["ptx"]
WHEEL, VERSION = REQUIREMENT.split("==")
# Where make installs the wheel.
INSTALLED = ROOT / "build" / "nvrtc"
OPTIONS = (
    "--gpu-architecture=compute_70",
    "--std=c++17",
    "--fmad=false",  # a product is rounded before it is added, as on the host
)
# NVRTC has no standard headers. These two declare what the sources use of them.
STANDARD = {
    "cstddef": """
using size_t = decltype(sizeof(0));
#define offsetof(type, member) (size_t(&((type*)0)->member))
""",
    "cstdint": """
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
""",
}

TEMPLATE = """\
// Written by tools/make_ptx.py from kernels.cu, with NVRTC {version}. Do not edit.
// Sources: {digest}
// clang-format off
inline constexpr char kKernelsPtx[] = R"ptx({ptx})ptx";
"""


def digest() -> str:
    """Return a number for the sources and the options, comments and layout aside."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in (SOURCE, *HEADERS)]
    code = [re.sub(r"\s+", "", re.sub(r"//[^\n]*", "", text)) for text in texts]
    parts = [*code, *OPTIONS, *STANDARD.values(), VERSION]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def library_path() -> Path | None:
    """Return where the wheel has libnvrtc, or None without that version of it."""
    path = [str(INSTALLED), *sys.path]
    for wheel in importlib.metadata.distributions(name=WHEEL, path=path):
        for file in wheel.files or ():
            if wheel.version == VERSION and file.name.startswith("libnvrtc.so"):
                return Path(str(wheel.locate_file(file)))
    return None


def compile_to_ptx(path: Path) -> str:
    """Return the PTX of kernels.cu. Raises RuntimeError with NVRTC's log."""
    nvrtc = ctypes.CDLL(str(path))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(result: int) -> None:
        if result != 0:
            raise RuntimeError(nvrtc.nvrtcGetErrorString(result).decode())

    def text_of(size, get) -> str:
        count = ctypes.c_size_t()
        check(size(program, ctypes.byref(count)))
        buffer = ctypes.create_string_buffer(count.value)
        check(get(program, buffer))
        return buffer.value.decode()

    headers = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in HEADERS
    } | STANDARD
    strings = ctypes.c_char_p * len(headers)
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            (ROOT / SOURCE).read_bytes(),
            SOURCE.encode(),
            len(headers),
            strings(*(text.encode() for text in headers.values())),
            strings(*(name.encode() for name in headers)),
        )
    )
    options = (ctypes.c_char_p * len(OPTIONS))(*(one.encode() for one in OPTIONS))
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    if result != 0 or log.strip():
        raise RuntimeError(f"NVRTC on {SOURCE}:\n{log}")
    ptx = text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return ptx


def without_unused(ptx: str) -> str:
    """Return the text without variables of NVRTC's own that no kernel uses."""
    lines = ptx.splitlines(keepends=True)
    names = [re.match(r"\.global .*?\.[a-z]\d+ ([\w$]+)", line) for line in lines]
    return "".join(
        line
        for line, name in zip(lines, names, strict=True)
        if name is None or ptx.count(name[1]) > 1
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the PTX, compare it with what is checked in, or print that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--check", action="store_true", help="compare with the file instead of writing"
    )
    choice.add_argument(
        "--ptx", action="store_true", help="print the PTX of the file, for ptxas"
    )
    choice.add_argument(
        "--requirement", action="store_true", help="print what pip has to install"
    )
    options = parser.parse_args(arguments)
    if options.requirement:
        print(REQUIREMENT)
        return 0
    output = ROOT / OUTPUT
    if options.ptx:
        print(
            output.read_text(encoding="utf-8").split('R"ptx(')[1].split(')ptx"')[0],
            end="",
        )
        return 0
    path = library_path()
    if path is None:
        print(f"make_ptx.py needs {REQUIREMENT}: run `make ptx`", file=sys.stderr)
        return 2
    ptx = without_unused(compile_to_ptx(path))
    made = TEMPLATE.format(version=VERSION, digest=digest(), ptx=ptx)
    if not options.check:
        output.write_text(made, encoding="utf-8")
        return 0
    if output.is_file() and output.read_text(encoding="utf-8") == made:
        return 0
    print(f"{OUTPUT} is not what {SOURCE} compiles to: run `make ptx`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
