"""Run ``python -m jaxcomm.doctor``: see ``--help``."""

import json
import os
import signal
import sys

from absl import app, flags, logging

from jaxcomm.diagnostics.merge import merge_files
from jaxcomm.diagnostics.record import RecordError
from jaxcomm.doctor import machine, options, page, rows, sharing, software

_PROBLEM = 1
_WRONG_USE = 2
_UNREAD = 128 + signal.SIGPIPE


def main(asked: options.Options) -> int:
    """Examine, or compare records; return the exit status.

    0, or 1 if the examination found a problem, or 2 if a record cannot be read.
    """
    if asked.merge:
        return _merge(asked)
    # Which backends JAX tried in vain is no news.
    logging.set_verbosity(logging.WARNING)
    found = {
        "versions": list(software.versions()),
        "devices": list(software.devices()),
        "backends": list(software.backends()),
        "machine": list(machine.machine()),
        "shared memory": [*machine.shared_memory(), *sharing.sharing()],
        "variables": list(software.variables()),
    }
    if asked.json:
        print(json.dumps(rows.to_json(found), indent=1))
    else:
        page.show(found)
    return _PROBLEM if rows.problems(found) else 0


def _merge(asked):
    try:
        merged = merge_files(asked.merge)
    except RecordError as error:
        print(f"jaxcomm.doctor: {error}", file=sys.stderr)
        return _WRONG_USE
    print(json.dumps(merged.to_json(), indent=1) if asked.json else merged)
    return 0


def _parse(argv):
    """Read the command line, or end the process with help or a line of advice."""
    if {"-h", "-help", "--help", "--helpfull"} & set(argv[1:]):
        print(options.usage())
        sys.exit(0)
    options.define(flags.FLAGS)
    try:
        return options.read(flags.FLAGS, argv)
    except options.UsageError as error:
        print(f"jaxcomm.doctor: {error}. See --help.", file=sys.stderr)
        sys.exit(_WRONG_USE)


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
    app.run(_until_nobody_reads, flags_parser=_parse)
