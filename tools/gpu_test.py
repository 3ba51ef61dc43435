"""Run tests/gpu on a machine with NVIDIA GPUs: ``make gpu-test``.

With ``ARGS=--each`` there is a process for each GPU, as large jobs have it. Other words
are pytest's. Files that are named among them run alone. With ``--installed``, the
package that this Python finds is tested, and none is built.

It takes the Python that make names, if that has JAX for CUDA, pytest and the build
tools; nothing is fetched then. Otherwise make installs them into ``.venv``. The package
is built into ``build/gpu``, and nothing else is changed. pytest says at the end of each
part what it did not run, and why.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from gpu_count import count_gpus  # noqa: E402

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
# What takes one GPU, or starts processes by itself.
_IN_ONE_PROCESS = (
    *_KERNELS,
    "tests/gpu/test_each.py", "tests/gpu/test_faults.py", "tests/gpu/test_survivors.py",
)  # fmt: skip
NONE_RAN = 5  # pytest's status


NO_GPU, LACKS = 3, 2  # what ``--serves`` may return


def main(words: list[str]) -> int:
    """Build and test; return pytest's exit status."""
    gpus = count_gpus()
    if not gpus:
        print("make gpu-test: no NVIDIA GPU that a driver serves", file=sys.stderr)
        return NO_GPU
    lacking = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if not any(map(importlib.util.find_spec, CUDA)):
        lacking.append(" or ".join(CUDA))
    if lacking:
        print(f"==> {sys.executable} lacks {', '.join(lacking)}")
    if lacking or words == ["--serves"]:
        return LACKS if lacking else 0
    own = {"--each": False, "--installed": False}
    own |= {word: True for word in words if word in own}
    words = [word for word in words if word not in own]
    if not own["--installed"]:
        _build()
    os.environ |= {
        # The source folder jaxcomm/ lacks the extension, and would hide the package.
        "PYTHONSAFEPATH": "1",
        # Host callbacks and oracles need CPU devices, too.
        "JAX_PLATFORMS": "cuda,cpu",
    }
    os.environ.setdefault("JAXCOMM_TEST_CACHE", str(BUILT / "compiled"))
    named = [word for word in words if word.partition("::")[0].endswith(".py")]
    if own["--each"]:
        words = [word for word in words if word not in named]
        statuses = [_pytest(file, *words, each=gpus) for file in named or in_each()]
    else:
        parts = [[]] if named else PARTS
        statuses = [_pytest(*part, *words) for part in parts]
    # A part may have no test of those that were asked for, but not all of them.
    ran = [status for status in statuses if status != NONE_RAN]
    return max(ran, default=NONE_RAN)


def in_each() -> list[str]:
    """Return the files that run in a process for each GPU."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    every = [file.relative_to(ROOT).as_posix() for file in files]
    return [file for file in every if file not in _IN_ONE_PROCESS]


def _build():
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
    found = filter(None, [str(BUILT / "packages"), of_others])
    os.environ["PYTHONPATH"] = os.pathsep.join(found)


def _pytest(*words, each=0):
    command = [sys.executable, "-P", "-m"]
    if each:
        # A process that fails alone leaves the others in another test: it ends them.
        command += ["jaxcomm.launch", "-n", str(each), "-m"]
        words = "-x", "-p", "no:cacheprovider", *words
    command += ["pytest", "-m", "gpu", *words]
    print("==>", *command[3:], flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
