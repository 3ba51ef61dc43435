"""Everything a run found out, as JSON."""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version
import numpy as np

import jaxcomm
from bench.cases import Session
from bench.rows import Row

# Raised when a field changes its meaning or goes; new ones may come without.
SCHEMA = 2
COMMAND = ("python", "-m", "bench")


def machine() -> dict:
    """Describe where this runs.

    Returns:
      ``cpu`` model, ``cores`` of the machine, ``cores_allowed`` to this process,
      ``memory_bytes``, ``system``, and ``load_average`` over the last minute.
    """
    # Not on every system: macOS has no affinity, Windows no load average.
    affinity = getattr(os, "sched_getaffinity", None)
    load = getattr(os, "getloadavg", None)
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "load_average": load()[0] if load else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    return {
        "python": platform.python_version(),
        "jaxcomm": jaxcomm.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
    }


def environment() -> dict[str, str]:
    """Return the variables that change what is measured."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(("JAXCOMM_", "XLA_FLAGS", "JAX_"))
    }


def commit() -> str | None:
    """Return the commit that is checked out, None outside of a repository.

    It ends in ``-dirty`` if a tracked file was changed since. Of files from `git
    archive` it is the commit that they are from.
    """
    archived = Path(__file__).with_name("commit.txt").read_text().strip()
    if not archived.startswith("$"):
        return archived
    asked = ["git", "describe", "--always", "--abbrev=7", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(
            asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def document(
    rows: Sequence[Row],
    session: Session | None,
    at_start: dict,
    *,
    started: datetime.datetime,
    interrupted: bool,
) -> dict:
    """Return the whole report in types that the json module writes.

    Args:
      rows: what was measured.
      session: with the rooflines. If None, it was interrupted before they were known.
      at_start: what :func:`machine` said before anything ran.
      started: when that was, with its time zone.
      interrupted: whether the user ended it early.
    """
    return {
        "schema": SCHEMA,
        "command": [*COMMAND, *sys.argv[1:]],
        "started": started.isoformat(timespec="seconds"),
        "seconds": (datetime.datetime.now(datetime.UTC) - started).total_seconds(),
        "interrupted": interrupted,
        "commit": commit(),
        "machine": at_start,
        "load_average_at_end": machine()["load_average"],
        "versions": versions(),
        "environment": environment(),
        "effort": dataclasses.asdict(session.effort) if session else None,
        "rooflines": [
            {
                "name": roofline.name,
                "unit": roofline.unit,
                "work": roofline.work,
                "rate": roofline.rate,
            }
            for roofline in (session.rooflines if session else ())
        ],
        "rows": [row.to_json() for row in rows],
    }


def write(path: str, report: dict) -> None:
    """Write the report. A file that is there is replaced at once, or stays."""
    path = os.path.realpath(path)
    replaces = os.path.isfile(path) or not os.path.exists(path)
    beside = f"{path}.part" if replaces else path
    with open(beside, "w") as file:
        json.dump(report, file, indent=1, allow_nan=False)
        file.write("\n")
    if replaces:
        os.replace(beside, path)


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes():
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
