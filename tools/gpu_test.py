"""Run tests/gpu on a machine with NVIDIA GPUs: ``make gpu-test``.

It takes the Python that make names, if that has JAX for CUDA, pytest and the build
tools; nothing is fetched then. Otherwise make installs them into ``.venv``. The package
is built into ``build/gpu``, and nothing else is changed. pytest says at the end of each
part what it did not run, and why.
"""

import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BUILT = ROOT / "build" / "gpu"
CUDA = "jax_cuda13_plugin", "jax_cuda12_plugin"
NEEDED = (
    *("pytest", "pytest_timeout", "xdist", "hypothesis", "rich"),
    *("nanobind", "scikit_build_core", "hatch_fancy_pypi_readme", "cmake", "ninja"),
)
# First what takes one GPU, and waits for compilers most of the time: many at a time.
# Then what needs the GPUs for itself.
_KERNELS = "tests/gpu/test_fused_attention.py", "tests/gpu/test_pallas_attention.py"
PARTS = (
    ["-n", "8", *_KERNELS],
    ["tests/gpu", *(f"--ignore={path}" for path in _KERNELS)],
)
NONE_RAN = 5  # pytest's status


NO_GPU, LACKS = 3, 2  # what ``--serves`` may return


def main(words: list[str]) -> int:
    """Build and test; return pytest's exit status."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"make gpu-test: no driver of an NVIDIA GPU: {error}", file=sys.stderr)
        return NO_GPU
    lacking = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if not any(map(importlib.util.find_spec, CUDA)):
        lacking.append(" or ".join(CUDA))
    if lacking:
        print(f"==> {sys.executable} lacks {', '.join(lacking)}")
    if lacking or words == ["--serves"]:
        return LACKS if lacking else 0
    tools = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"),
            *("--no-index", "--no-deps", "--no-build-isolation"),
            *("--target", BUILT / "packages"),
            *("--config-settings", f"build-dir={BUILT / 'objects'}", ROOT),
        ],
        check=True,
        env=os.environ | {"PATH": tools},
    )
    of_others = os.environ.get("PYTHONPATH")
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(BUILT / "packages"), of_others])
        ),
        # The source folder jaxcomm/ lacks the extension, and would hide the package.
        "PYTHONSAFEPATH": "1",
        # Host callbacks and oracles need CPU devices, too.
        "JAX_PLATFORMS": "cuda,cpu",
        "JAXCOMM_TEST_CACHE": str(BUILT / "compiled"),
    }
    statuses = [_pytest(*part, *words) for part in PARTS]
    # A part may have no test of those that were asked for, but not both.
    ran = [status for status in statuses if status != NONE_RAN]
    return max(ran, default=NONE_RAN)


def _pytest(*words):
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", *words]
    print("==>", *command[3:], flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
