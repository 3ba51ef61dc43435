"""What passed for this very tree: a record of each check, so that none runs twice.

A record counts while the files of the tree, the command, its interpreter and what the
check made are the same.
"""

import hashlib
import json
import subprocess

from release import environments as env

FOLDER = env.WORK / "passed"


def tree() -> str:
    """Return a digest of every file of the tree that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=env.ROOT, text=True).split("\0")
    return _digest(env.ROOT / name for name in sorted(filter(None, names)))


def commit() -> str:
    """Return the commit in words, and whether files differ from it."""
    return subprocess.check_output(
        ["git", "describe", "--always", "--dirty=, with changes"],
        cwd=env.ROOT,
        text=True,
    ).strip()


def write(name: str, inputs: list[str], makes: str, seconds: float, run: str) -> None:
    """Record that a check passed.

    Args:
      name: of the check.
      inputs: all that its outcome depends on.
      makes: a pattern of files that it makes for other checks, or an empty text.
      seconds: what it took.
      run: in which run, in words.
    """
    record = {"inputs": inputs, "made": files(makes), "seconds": seconds, "run": run}
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1))


def read(name: str, inputs: list[str], makes: str) -> tuple[float, str] | None:
    """Return what a check took, and in which run; None: it must run."""
    path = FOLDER / f"{name}.json"
    try:
        record = json.loads(path.read_text())
        same = record["inputs"] == inputs and record["made"] == files(makes)
        return (record["seconds"], record["run"]) if same else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def forget(name: str) -> None:
    """Remove the record of a check: it runs, and may not come to its end."""
    (FOLDER / f"{name}.json").unlink(missing_ok=True)


def files(pattern: str) -> str:
    """Return a digest of the files that fit a pattern, or an empty text for none."""
    return _digest(sorted(env.ROOT.glob(pattern))) if pattern else ""


def _digest(paths) -> str:
    digest = hashlib.sha256()
    for path in paths:
        # A file that was deleted, and a link to a folder, count by their names.
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
