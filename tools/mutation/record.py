"""A pytest plugin that writes which lines of jaxcomm each test executes.

MUTATION_RECORD names the file: JSON from a test's id to its seconds, and its lines by
file.
"""

import json
import os
import pathlib
import sys
import threading

import pytest

ROOT = pathlib.Path.cwd()
_PREFIX = str(ROOT / "jaxcomm") + os.sep
_records: dict[str, dict] = {}
_lines: set[tuple[str, int]] = set()


def _on_call(frame, event, argument):
    # One call for each function; lines are asked for in ours alone.
    if not frame.f_code.co_filename.startswith(_PREFIX):
        return None
    return _on_line


def _on_line(frame, event, argument):
    _lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _on_line


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Record one test."""
    _lines.clear()
    threading.settrace(_on_call)
    sys.settrace(_on_call)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        by_file: dict[str, list[int]] = {}
        for path, line in sorted(_lines):
            by_file.setdefault(str(pathlib.Path(path).relative_to(ROOT)), []).append(
                line
            )
        _records.setdefault(item.nodeid, {})["lines"] = by_file


def pytest_runtest_logreport(report):
    """Add up the seconds of a test and of what it needed."""
    record = _records.setdefault(report.nodeid, {})
    record["seconds"] = record.get("seconds", 0.0) + report.duration
    if report.failed or report.skipped:
        record["unusable"] = True


def pytest_sessionfinish():
    """Write what was found."""
    pathlib.Path(os.environ["MUTATION_RECORD"]).write_text(json.dumps(_records))
