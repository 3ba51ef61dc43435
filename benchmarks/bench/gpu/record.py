"""The file of ``bench gpu``: what runs on one machine found, each with its commit."""

import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence

from bench import report
from bench.gpu import rows
from bench.gpu.rows import Figure, Finding
from bench.options import UsageError

# What must be equal for the rows of two runs to stand in one file; of machines, this.
_SAME, _OF_MACHINE = ("schema", "heading", "versions"), ("cpu", "cores")


class Record:
    """A run's rows, beside those of earlier runs in the same file.

    A row takes the place of the same row of an earlier run. The file is written with
    each, so that what ends a run takes away nothing.
    """

    def __init__(self, path: str | None, heading: Sequence[str]):
        """Reads the file, if it is there.

        Args:
          path: of the file. If None, nothing is written.
          heading: ranks, devices and software, in lines.

        Raises:
          UsageError: the file has rows of another machine or of other versions.
        """
        self._path = path
        machine = report.machine()
        load = machine.pop("load_average")
        self._document = {
            "schema": report.SCHEMA,
            "heading": list(heading),
            "machine": machine,
            "versions": report.versions(),
        }
        earlier = _read(path)
        for name, mine in _identity(self._document).items() if earlier else ():
            if (other := _identity(earlier)[name]) != mine:
                raise UsageError(
                    f"--json: the rows of {path} have {name} {other!r}, and this run "
                    f"has {mine!r}; give another file, or remove this one"
                )
        self._run = {
            "command": [*report.COMMAND, *sys.argv[1:]],
            "started": datetime.datetime.now(datetime.UTC).isoformat(
                timespec="seconds"
            ),
            "commit": report.commit(),
            "load_average": load,
            "environment": report.environment(),
            "seconds": {},
            "rows": [],
        }
        self._earlier = earlier.get("runs", [])

    def begin(self, part: str) -> None:
        """Forgets why an earlier run did not measure a part."""
        self._replace({"part": part, "name": part})

    def add(self, part: str, row: Figure | Finding) -> None:
        """Adds a row of a part, and writes the file."""
        fields = rows.to_json(part, row)
        self._replace(fields)
        self._run["rows"].append(fields)
        self._write()

    def end(self, part: str, seconds: float) -> None:
        """Notes how long a whole part took, and writes the file."""
        self._run["seconds"][part] = round(seconds, 1)
        self._write()

    def _write(self):
        if self._path:
            runs = [run for run in self._earlier if run["rows"]]
            report.write(self._path, {**self._document, "runs": [*runs, self._run]})

    def _replace(self, row):
        for run in self._earlier:
            run["rows"] = [old for old in run["rows"] if _key(old) != _key(row)]


def all_rows(document: Mapping) -> list[dict]:
    """Returns the rows of a file, each with the ``commit`` of its run."""
    return [
        {**row, "commit": run["commit"]}
        for run in document["runs"]
        for row in run["rows"]
    ]


def _key(row):
    return row["part"], row["name"], row.get("peer")


def _identity(document):
    of_machine = document.get("machine") or {}
    return {
        **{name: document.get(name) for name in _SAME},
        **{name: of_machine.get(name) for name in _OF_MACHINE},
    }


def _read(path):
    if not path or not os.path.isfile(path) or not os.path.getsize(path):
        return {}
    try:
        with open(path) as file:
            found = json.load(file)
    except ValueError as error:
        raise UsageError(f"--json: {path} has no JSON: {error}") from None
    if not isinstance(found, dict) or "runs" not in found:
        raise UsageError(
            f"--json: {path} has no rows of bench gpu; give another file, or remove it"
        )
    return found
