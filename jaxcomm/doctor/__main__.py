"""Run ``python -m jaxcomm.doctor``: see ``--help``."""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence

import jax

from jaxcomm import compat
from jaxcomm.diagnostics import perfetto
from jaxcomm.diagnostics.files import merge_files
from jaxcomm.diagnostics.record import RecordError
from jaxcomm.doctor import (
    check,
    machine,
    options,
    ras,
    rows,
    software,
)

_PROBLEM = 1
_WRONG_USE = 2
_UNREAD = 128 + signal.SIGPIPE


def main(asked: argparse.Namespace) -> int:
    """Examine the machine, check collectives or compare records; return the status.

    0; 1 if there is a problem or a wrong result; 2 if a record cannot be read or there
    is nothing to check.
    """
    # JAX logs which backends it tried in vain.
    logging.getLogger("jax").setLevel(logging.WARNING)
    if asked.merge:
        return _merge(asked)
    if asked.check:
        return _check(asked)
    found = {
        "versions": list(software.versions()),
        "devices": list(software.devices()),
        "backends": list(software.backends()),
        "NCCL job": [ras.job()],
        "machine": list(machine.machine()),
        "variables": list(software.variables()),
    }
    if asked.json:
        print(json.dumps(rows.to_json(found), indent=1))
    else:
        print(rows.text(found))
    return _PROBLEM if rows.problems(found) else 0


def _merge(asked):
    try:
        merged = merge_files(asked.files)
    except RecordError as error:
        return _refuse(error)
    print(json.dumps(merged.to_json(), indent=1) if asked.json else merged)
    try:
        if asked.trace:
            perfetto.save(merged, asked.trace)
    except (OSError, ValueError) as error:
        return _refuse(error)
    return _WRONG_USE if merged.skipped else 0


def _check(asked):
    if asked.devices:
        check.use_virtual_devices(asked.devices)
    try:
        mesh = check.mesh_of_all()
    except (check.CheckError, *compat.NO_DEVICES) as error:
        return _refuse(str(error).partition("\n")[0])
    backend = check.backend_of(mesh)
    device = mesh.devices.flat[0]
    results = list(check.run(mesh))
    wrong = [result for result in results if result.problem is not None]
    if jax.process_index() == 0:
        _show(asked, results, len(wrong), backend, f"{mesh.size} x {device.platform}")
    for result in wrong:
        print(
            f"jaxcomm.doctor: {result.collective} of {result.bytes} bytes: "
            f"{result.problem}",
            file=sys.stderr,
        )
    return _PROBLEM if wrong else 0


def _show(asked, results: Sequence[check.Result], wrong: int, backend, devices):
    if asked.json:
        listed = [dataclasses.asdict(result) for result in results]
        found = {"backend": backend, "devices": devices, "results": listed}
        print(json.dumps(found, indent=1))
        return
    served = f"served by the backend {backend!r}"
    if backend == "xla":
        served += ": XLA's own collectives are compared with themselves"
    print(f"{devices}, {served}\n")
    print(check.text(results))
    right = len(results) - wrong
    print(f"\n{right} of {len(results)} right" + (f", {wrong} WRONG" if wrong else ""))


def _refuse(reason):
    print(f"jaxcomm.doctor: {reason}", file=sys.stderr)
    return _WRONG_USE


def _parse(words):
    """Read the command line, or end the process with help or a line of advice."""
    try:
        return options.read(words)
    except options.UsageError as error:
        sys.exit(_refuse(f"{error}. See --help."))


def _until_nobody_reads(asked):
    try:
        status = main(asked)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush once more at the end, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    return status


if __name__ == "__main__":
    sys.exit(_until_nobody_reads(_parse(sys.argv[1:])))
