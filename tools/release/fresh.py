"""Install wheels, or the sdist, into new environments; use them outside the tree.

Wheels are installed where PATH has no compiler. The tests are those of the tree, copied
to a temporary folder: the package under test is the installed one alone.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from release import environments as env
from release import wheels

# The newest jax of 3.11 is the oldest that we support, and 3.13 gets the newest.
JAX = {"3.12": ["jax==0.11.2", "jaxlib==0.11.2"]}
# The stand-in for NCCL needs a compiler. jax 0.11.2 fails on zero-size operands.
LEFT_OUT = {"3.12": "nccl or gives_what_the_whole or slices_land or empty_arrays"}
TOOLS = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis"]
COPIED = ["tests", "benchmarks", "examples", "docs", "README.md", "pyproject.toml"]
TESTS = [
    "tests/docs/test_readme.py",
    "tests/collectives",
    "tests/communicator",
    "tests/primitives",
    "tests/attention/test_layout.py",
    "tests/attention/test_dot_product_attention.py",
    "tests/launch",
    "tests/doctor",
]
# What the wheel without the extension must do.
PROGRAM = "without_extension.py"
LAUNCHED = """\
import jax, jaxcomm
mesh = jax.make_mesh((2,), "i", axis_types=(jax.sharding.AxisType.Auto,))
total = jax.jit(jax.shard_map(
    lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P()))
x = jax.make_array_from_callback(
    (2,), jax.NamedSharding(mesh, jax.P("i")), lambda at: jax.numpy.ones(1))
assert total(x).addressable_data(0) == 2, total(x)
print("process", jax.process_index(), "of", jax.process_count(), "has the sum")
"""


@contextlib.contextmanager
def outside(python: Path) -> Iterator[tuple[Path, Callable[..., None]]]:
    """Yield an empty folder, and what runs Python there with its own packages alone."""
    # Nothing of this tree: neither the sources nor what the caller's environment adds.
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAXCOMM_"))
    }
    clean |= {"PATH": str(python.parent), "JAX_PLATFORMS": "cpu"}
    assert not any(shutil.which(cc, path=clean["PATH"]) for cc in ("cc", "c++", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        yield (
            Path(folder),
            lambda *command: env.run([python, *command], env=clean, cwd=folder),
        )


def use_all(folder: Path, run: Callable[..., None]) -> None:
    """Run doctor and the launcher of an installed jaxcomm."""
    run("-c", "import jaxcomm; print(jaxcomm.__version__, jaxcomm.__file__)")
    run("-m", "jaxcomm.doctor", "--check", "--devices", "2")
    Path(folder, "launched.py").write_text(LAUNCHED)
    run("-m", "jaxcomm.launch", "-n", "2", "launched.py")


def use(python: Path, left_out: str = "nccl") -> None:
    """Run doctor, the launcher and some tests with an installed jaxcomm."""
    with outside(python) as (folder, run):
        use_all(folder, run)
        for name in COPIED:
            source, copy = env.ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                shutil.copy(source, copy)
        run("-m", "pytest", "-q", "-n", "2", "--one-of-each",
            "-k", f"not ({left_out})", *TESTS)  # fmt: skip


def check_wheel(version: str, interpreter: Path) -> None:
    """Install the wheel that pip would choose for a version, and use it."""
    wheel = wheels.newest("cp311" if version == "3.11" else "cp312-abi3")
    python = env.make(f"fresh-{version}", interpreter)
    path = dict(os.environ, PATH=str(python.parent))
    jax = JAX.get(version, env.TRIED)
    env.install(python, "--only-binary", ":all:", wheel, *jax, *TOOLS, env=path)
    env.run([python, "-m", "pip", "check"], env=path)
    use(python, LEFT_OUT.get(version, "nccl"))


def check_wheel_without_extension() -> None:
    """Install the wheel without the extension, and use it: XLA communicates."""
    tag = wheels.WITHOUT_EXTENSION
    python = env.make(f"fresh-{tag}", Path(sys.executable))
    path = dict(os.environ, PATH=str(python.parent))
    wheel = f"{wheels.newest(tag)}[demo]"
    env.install(python, "--only-binary", ":all:", wheel, env=path)
    with outside(python) as (folder, run):
        use_all(folder, run)
        shutil.copy(env.ROOT / "tests" / "support" / PROGRAM, folder)
        run(PROGRAM)
        shutil.copytree(
            env.ROOT / "examples" / "language_model", folder / "language_model"
        )
        run("-m", "language_model", "--steps", "2")


def check_sdist() -> None:
    """Build the sdist, install from it with this machine's compiler, and use that."""
    raw = env.WORK / "sdist"
    shutil.rmtree(raw, ignore_errors=True)
    # Without an environment of its own, which would hold jaxlib for nothing.
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    env.run([*build, "--sdist", "--outdir", raw])
    (sdist,) = raw.glob("*.tar.gz")
    wheels.DIST.mkdir(exist_ok=True)
    shutil.copy(sdist, wheels.DIST)
    python = env.make("fresh-sdist", Path(sys.executable))
    env.install(python, sdist, *TOOLS)
    use(python)


def main() -> None:
    """Check the sdist, or the wheel of each Python."""
    parser = argparse.ArgumentParser(prog="release.fresh", description=__doc__)
    parser.add_argument("what", help="sdist, or wheels")
    what = f"a Python, such as 3.13, or {wheels.WITHOUT_EXTENSION}"
    parser.add_argument("--only", metavar="VERSION", help=what)
    args = parser.parse_args()
    if args.what == "sdist":
        check_sdist()
        return
    found = env.interpreters()
    for version in env.supported():
        if args.only in (None, version):
            if version in found:
                check_wheel(version, found[version])
            else:
                print(f"Python {version}: NOT RUN, this machine has no interpreter")
    if args.only in (None, wheels.WITHOUT_EXTENSION):
        check_wheel_without_extension()


if __name__ == "__main__":
    main()
