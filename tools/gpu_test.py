"""Run tests/gpu on a machine with NVIDIA GPUs: ``make gpu-test``.

With ``ARGS=--each`` there is a process for each GPU, as large jobs have it. With
``--on-one=8`` there are eight, which share the first GPU. Other words are pytest's.
Files that are named among them run alone. With ``--installed``, the package that this
Python finds is tested, and none is built.

It takes the Python that make names, if that has JAX for CUDA, pytest and the build
tools; nothing is fetched then. Otherwise make installs them into ``.venv``. The package
is built into ``build/gpu``, and nothing else is changed. pytest says at the end of each
part what it did not run, and why.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from gpu_count import count_gpus  # noqa: E402

BUILT = ROOT / "build" / "gpu"
CUDA = "jax_cuda13_plugin", "jax_cuda12_plugin"
NEEDED = (
    *("pytest", "pytest_timeout", "xdist", "hypothesis", "rich"),
    *("nanobind", "scikit_build_core", "hatch_fancy_pypi_readme", "cmake", "ninja"),
)
# First what waits for compilers most of the time, several at a time: on one GPU, then
# on all. Then what needs the GPUs for itself.
_KERNELS = "tests/gpu/test_fused_attention.py", "tests/gpu/test_pallas_attention.py"
_ATTENTION = "tests/gpu/test_attention.py"
_ON_ONE = "--on-one="
PARTS = (
    ["-n", "8", *_KERNELS],
    ["-n", "4", _ATTENTION],
    ["tests/gpu", *(f"--ignore={path}" for path in (*_KERNELS, _ATTENTION))],
)
# What takes one GPU, or starts processes by itself.
_IN_ONE_PROCESS = (
    *_KERNELS,
    "tests/gpu/test_each.py", "tests/gpu/test_faults.py", "tests/gpu/test_survivors.py",
)  # fmt: skip
NONE_RAN = 5  # pytest's status


NO_GPU, LACKS = 3, 2  # what ``--serves`` may return
WRONG_USE = 4  # as pytest's


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
    shares = [word.removeprefix(_ON_ONE) for word in words if word.startswith(_ON_ONE)]
    words = [x for x in words if x not in own and not x.startswith(_ON_ONE)]
    if not own["--installed"]:
        _build()
    os.environ |= {
        # The source folder jaxcomm/ lacks the extension, and would hide the package.
        "PYTHONSAFEPATH": "1",
        # Host callbacks and oracles need CPU devices, too.
        "JAX_PLATFORMS": "cuda,cpu",
        # XLA would time its products, in each process and for each shape.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    }
    os.environ.setdefault("JAXCOMM_TEST_CACHE", str(BUILT / "compiled"))
    named = [word for word in words if word.partition("::")[0].endswith(".py")]
    if shares:
        if not shares[-1].isdecimal() or int(shares[-1]) < 2:
            text = f"make gpu-test: --on-one={shares[-1]}: give a number from 2 on"
            print(text, file=sys.stderr)
            return WRONG_USE
        gpus = int(shares[-1])
        os.environ |= _sharing(gpus)
    if own["--each"] or shares:
        words = [word for word in words if word not in named]
        statuses = _in_each(named or in_each(), words, gpus)
    else:
        parts = [[]] if named else PARTS
        statuses = [_pytest(*part, *words) for part in parts]
    # A part may have no test of those that were asked for, but not all of them.
    ran = [status for status in statuses if status != NONE_RAN]
    return max(ran, default=NONE_RAN)


def _sharing(ranks: int) -> dict[str, str]:
    """Return environment variables for ranks that share a GPU, as the bench has them.

    For speed they need a daemon of MPS.
    """
    found = os.environ.get("PYTHONPATH"), str(ROOT / "benchmarks")
    text = (
        "import json, sys; from bench.gpu import processes; "
        "print(json.dumps(processes.for_one_gpu(int(sys.argv[1]))))"
    )
    asked = subprocess.run(
        [sys.executable, "-P", "-c", text, str(ranks)],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))},
    )
    return json.loads(asked.stdout)


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


def _in_each(files, words, gpus):
    """Run files in one job, and in another what comes behind a file that fails.

    A process that fails alone leaves the others in another test: it ends them.
    """
    statuses = []
    while files:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["JAXCOMM_TEST_REACHED"] = folder
            statuses.append(_pytest("-x", *files, *words, each=gpus))
            # Of each process. One that fails is behind the others.
            reached = {at.read_text() for at in pathlib.Path(folder).iterdir()}
        names = [pathlib.Path(file.partition("::")[0]).name for file in files]
        ends = [len(names) - names[::-1].index(n) for n in reached if n in names]
        if statuses[-1] in (0, NONE_RAN) or not ends:
            break
        files = files[min(ends) :]
    return statuses


def _pytest(*words, each=0):
    command = [sys.executable, "-P", "-m"]
    if each:
        command += ["jaxcomm.launch", "-n", str(each), "-m"]
        words = "-p", "no:cacheprovider", *words
    command += ["pytest", "-m", "gpu", *words]
    print("==>", *command[3:], flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
