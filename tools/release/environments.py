"""Python interpreters of this machine, and virtual environments made with them."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Of jax and jaxlib, what ran the tests.
TRIED = PROJECT["tool"]["jaxcomm"]["tried"]


def supported() -> list[str]:
    """Return the Python versions of the classifiers, such as ``"3.11"``, in order."""
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)$")
    found = filter(None, map(pattern.match, PROJECT["project"]["classifiers"]))
    return sorted((m[1] for m in found), key=lambda v: int(v[2:]))


@functools.cache
def interpreters() -> dict[str, Path]:
    """Return an interpreter of each supported version that this machine has.

    They are looked for in PATH, then among pyenv's.
    """
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in supported():
        # pyenv's own programs in PATH stand for versions that may not be switched on.
        named = shutil.which(f"python{version}")
        for path in [*([Path(named)] if named else []),
                     *pyenv.glob(f"{version}.*/bin/python{version}")]:  # fmt: skip
            if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                found[version] = path
                break
    return found


def run(command: Sequence, *, env: Mapping[str, str] | None = None, cwd=ROOT) -> None:
    """Run a command, or raise ``SystemExit`` that names it."""
    print("+", *command, flush=True)
    status = subprocess.run(command, cwd=cwd, env=env).returncode
    if status:
        raise SystemExit(f"status {status}: {' '.join(map(str, command))}")


def make(name: str, interpreter: Path) -> Path:
    """Make an empty virtual environment, and return its Python."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run([interpreter, "-m", "venv", folder])
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path, env=None) -> None:
    """Install packages into the virtual environment of ``python``."""
    quiet = ["--quiet", "--disable-pip-version-check"]
    run([python, "-m", "pip", "install", *quiet, *what], env=env)


def main() -> int:
    """Print the interpreter of the version that is named, if this machine has it."""
    found = interpreters().get(sys.argv[1])
    print(found or f"this machine has no Python {sys.argv[1]}")
    return int(found is None)


if __name__ == "__main__":
    sys.exit(main())
