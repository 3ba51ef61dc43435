"""The command line."""

import dataclasses
import textwrap
from collections.abc import Sequence

from absl import flags


class UsageError(ValueError):
    """What was typed cannot be done; the text says what can."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
      merge: flight records to compare. If empty, the machine is examined.
      json: whether to print JSON instead of tables.
    """

    merge: tuple[str, ...] = ()
    json: bool = False


_FLAGS = {
    "merge": "compare the flight records that follow, one file of each process of a "
    "job, and say which rank is behind, at which operation",
    "json": "print JSON",
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    for name, about in _FLAGS.items():
        flags.DEFINE_bool(name, False, about, flag_values=values)
    # A flag may come after the files.
    values.set_gnu_getopt(True)


def usage() -> str:
    """Returns the help text."""
    lines = [
        "usage: python -m jaxcomm.doctor [--json]",
        "       python -m jaxcomm.doctor --merge FILE... [--json]",
        "",
        "Without --merge: versions, devices, backends, the machine, what its processes",
        "may do with each other, and the variables that jaxcomm reads; the exit status",
        "is 1 if there is a problem.",
        "",
    ]
    for name, about in _FLAGS.items():
        folded = textwrap.wrap(about, 70)
        lines.append(f"  --{name:7} {folded[0]}")
        lines += [" " * 12 + line for line in folded[1:]]
    lines += [
        "",
        "Flight records are written where JAXCOMM_DUMP_DIR says, when a collective",
        "fails and on SIGUSR1, and by jaxcomm.flight_record().save(file).",
    ]
    return "\n".join(lines)


def read(values: flags.FlagValues, argv: Sequence[str]) -> Options:
    """Reads and checks a command line.

    Args:
      values: with the flags of :func:`define`.
      argv: the program's name, then what was typed.

    Raises:
      UsageError: something in it cannot be done.
    """
    try:
        _, *files = values(argv)
    except flags.Error as error:
        raise UsageError(" ".join(str(error).split())) from None
    if values.merge and not files:
        raise UsageError("--merge: no file was given; name one of each process")
    if files and not values.merge:
        raise UsageError(f"{files[0]!r} goes with --merge")
    return Options(merge=tuple(files), json=values.json)
