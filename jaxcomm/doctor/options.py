"""The command line."""

import argparse
from collections.abc import Sequence

_EPILOG = """\
Without --check and --merge: versions, devices, backends, the machine, and the variables
that jaxcomm reads. The exit status is 1 if there is a problem.

--check runs every collective over all devices and compares the results with XLA's own.
Time is that of one call. GB/s (bytes / time) and bus GB/s are defined as in NVIDIA's
nccl-tests; bytes are those of the larger of operand and result on one device. The exit
status is 1 if a result is wrong.

Flight records are written where JAXCOMM_DUMP_DIR says, when a collective fails and on
SIGUSR1, and by jaxcomm.flight_record().save(file).
"""
# More are a slip of the finger.
_MOST_DEVICES = 256


class UsageError(ValueError):
    """The command line cannot be carried out; the text says what can."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def read(words: Sequence[str]) -> argparse.Namespace:
    """Read and check a command line.

    Returns:
      ``check``, ``merge`` and ``json``, which are true or false; ``files`` to merge;
      and what follows ``--devices`` and ``--trace``, or None.
    """
    parser = _Parser(
        prog="python -m jaxcomm.doctor",
        usage="python -m jaxcomm.doctor [--json]\n"
        "       python -m jaxcomm.doctor --check [--devices N] [--json]\n"
        "       python -m jaxcomm.doctor --merge FILE... [--json] [--trace FILE]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--check", action="store_true", help="run and time every collective"
    )
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        help="use N virtual CPU devices, not the devices that JAX finds",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="compare the flight records of a job, one file a process, and say which "
        "rank is behind, at which operation",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the records for https://ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_intermixed_args(words)
    if given.check and given.merge:
        raise UsageError("--check and --merge exclude each other; give one of them")
    if given.merge and not given.files:
        raise UsageError("--merge: no file was given; name one of each process")
    if given.files and not given.merge:
        raise UsageError(f"{given.files[0]!r} goes with --merge")
    if given.devices and not given.check:
        raise UsageError("--devices goes with --check")
    if given.trace and not given.merge:
        raise UsageError("--trace goes with --merge")
    return given


def _count(text):
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_DEVICES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 2 to {_MOST_DEVICES}"
        )
    return int(text)
