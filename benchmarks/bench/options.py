"""The command line: flags, their bounds, and errors of one line each."""

import argparse
import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

from bench import attention, chain, collectives, masks, memory, processes, scan

# Each thread of a virtual device takes memory and time to start.
_MOST_DEVICES = 128
# Each process takes half a gigabyte.
_MOST_PROCESSES = 64
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


_Entry = TypeVar("_Entry")


class UsageError(ValueError):
    """What was typed cannot be done; the text says what can."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """One subcommand.

    Attributes:
      about: what it measures, in a line.
      devices: sizes of the meshes unless ``--devices`` says otherwise.
      flags: those that it understands and some other does not.
    """

    about: str
    devices: tuple[int, ...]
    flags: tuple[str, ...] = ("devices",)


SUITES = {
    collectives.SUITE: Suite(
        "every collective at every size, one in a jit",
        collectives.DEVICES,
        ("devices", "sizes", "ops"),
    ),
    chain.SUITE: Suite("50 dependent psums of 256 bytes in one jit", chain.DEVICES),
    scan.SUITE: Suite("20 steps of a 256 KiB psum and a matrix product", scan.DEVICES),
    attention.SUITE: Suite(
        "ring attention against three other ways, forward and backward",
        attention.DEVICES,
        ("devices", "sequence"),
    ),
    masks.SUITE: Suite(
        "attention with documents and with a window, against one device",
        masks.DEVICES,
        ("devices", "sequence"),
    ),
    memory.SUITE: Suite(
        "what compiled ring attention holds as the ring grows", memory.DEVICES
    ),
    processes.SUITE: Suite(
        "several processes on this host, against XLA's gloo and mpi4jax",
        processes.PROCESSES,
        ("processes", "sizes", "ops"),
    ),
}
ALL = "all"
# Has a command line of its own, which __main__ hands the rest to.
GPU = "gpu"


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
      suites: keys of ``SUITES``, in their order.
      devices: sizes of the meshes. If None, those of each suite.
      processes: how many, one after the other. If None, those of the suite.
      sizes: bytes of each device's operand. If None, those of the suite.
      ops: keys of ``collectives.OPS``. If None, those of the suite.
      sequence: tokens. If None, that of the suite.
      repeats: rounds of each case. If None, as many as its time allows.
      quick: whether to show in seconds that all of it works.
      json: file to write. If None, none.
      plot: picture to write. If None, none.
    """

    suites: tuple[str, ...]
    devices: tuple[int, ...] | None = None
    processes: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    ops: tuple[str, ...] | None = None
    sequence: int | None = None
    repeats: int | None = None
    quick: bool = False
    json: str | None = None
    plot: str | None = None

    def devices_of(self, suite: str) -> tuple[int, ...]:
        """Return the sizes of the meshes that a suite measures."""
        if suite == processes.SUITE:
            return self.processes or processes.PROCESSES
        if self.devices is not None:
            return self.devices
        # The smallest ring on which ranks to the left and to the right differ.
        return (2, 4) if self.quick else SUITES[suite].devices

    @property
    def most_devices(self) -> int:
        """Of all suites asked for."""
        return max(max(self.devices_of(suite)) for suite in self.suites)


_FLAGS = {
    "devices": "sizes of the meshes, such as 2 or 2,4,8, each timed in a process with "
    "exactly so many devices. Default: by subcommand",
    "processes": "processes: how many, such as 2 or 2,8; short: -n. Default: "
    f"{', '.join(map(str, processes.PROCESSES))}",
    "sizes": "collectives, processes: bytes of each device's operand, such as "
    "256,64KiB,1MiB; rounded up to what the devices can split evenly. Default: 256 B "
    "to 16 MiB",
    "ops": f"collectives, processes: some of {', '.join(collectives.OPS)}. Default: "
    f"all but pmin and pmean; for processes {', '.join(processes.OPS)}",
    "sequence": "attention, masks: tokens of the whole sequence. Default: "
    f"{attention.SEQUENCE}",
    "repeats": "samples of each variant. Default: 31, fewer (but 5) for a case that "
    "takes more than ten seconds",
    "quick": "small sizes and three samples: shows that it works, not how fast it is",
    "json": "file to write everything to: rows, machine, versions",
    "plot": "picture to write, such as bench.png",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def _parser():
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    for name in _FLAGS:
        short = ("-n",) if name == "processes" else ()
        if name == "quick":
            parser.add_argument("--quick", action="store_const", const=True)
        else:
            # Texts, so that every bad value gets a message of our own.
            parser.add_argument(f"--{name}", *short)
    return parser


def usage() -> str:
    """Return the help text."""
    lines = ["usage: python -m bench SUBCOMMAND ... [--flag value ...]", ""]
    for name, suite in SUITES.items():
        lines.append(f"  {name:12} {suite.about}")
    lines += [
        f"  {ALL:12} all of these",
        f"  {GPU:12} NCCL on NVIDIA GPUs, with flags of its own: see {GPU} --help",
        "",
    ]
    for name, about in _FLAGS.items():
        folded = textwrap.wrap(about, 70)
        lines.append(f"  --{name:10} {folded[0]}")
        lines += [" " * 15 + line for line in folded[1:]]
    lines += [
        "",
        "Ours and jax.lax take turns; the ratio is the median over the rounds.",
        "Ctrl-C prints what was measured so far.",
    ]
    return "\n".join(lines)


def read(words: Sequence[str]) -> Options:
    """Read and check a command line.

    Args:
      words: what was typed after the program's name.

    Raises:
      UsageError: something in it cannot be done.
    """
    typed = vars(_parser().parse_intermixed_args(words))
    words = typed.pop("words")
    suites = _suites(words)
    given = {name: value for name, value in typed.items() if value is not None}
    for name in given:
        takers = [suite for suite in SUITES if name in SUITES[suite].flags]
        if takers and not set(takers) & set(suites):
            takers = " or ".join(takers)
            raise UsageError(f"--{name} goes with {takers}, not with {' '.join(words)}")
    options = Options(
        suites=suites,
        devices=_list(given, "devices", _device_count),
        processes=_list(given, "processes", _process_count),
        sizes=_list(given, "sizes", _size),
        ops=_list(given, "ops", _op),
        sequence=_positive(given, "sequence", "tokens"),
        repeats=_positive(given, "repeats", "samples"),
        quick=bool(given.get("quick", False)),
        json=given.get("json"),
        plot=given.get("plot"),
    )
    _check_sequence(options)
    for name in ("json", "plot"):
        if name in given:
            check_writable(name, given[name])
    return options


def check_writable(name: str, path: str) -> None:
    """Try to open a file for writing, leaving it as it was.

    Raises:
      UsageError: it cannot be written.
    """
    existed = os.path.lexists(path)
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise UsageError(f"--{name}: cannot write {path!r}: {error.strerror}") from None
    if not existed:
        os.remove(path)


def _suites(words):
    known = f"one of {', '.join(SUITES)}, {ALL} or {GPU}"
    if not words:
        raise UsageError(f"no subcommand was given; choose {known}")
    if words == [ALL]:
        return tuple(SUITES)
    if words == [GPU]:
        raise UsageError(f"{GPU} comes before its flags: {GPU} --flag value")
    for word in words:
        if word in (ALL, GPU):
            raise UsageError(f"{word} goes with no other subcommand")
        if word not in SUITES:
            raise UsageError(f"subcommand {word!r} is unknown; choose {known}")
    return tuple(suite for suite in SUITES if suite in words)


def _list(
    given: dict, name: str, read_one: Callable[[str], _Entry]
) -> tuple[_Entry, ...] | None:
    if name not in given:
        return None
    entries = [entry.strip() for entry in given[name].split(",")]
    # In the order given, each once.
    return tuple(dict.fromkeys(read_one(entry) for entry in entries))


def _device_count(text):
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_DEVICES:
        raise UsageError(
            f"--devices: {text!r} is not a number of devices; give 2 to "
            f"{_MOST_DEVICES}, several with commas between"
        )
    return int(text)


def _process_count(text):
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_PROCESSES:
        raise UsageError(
            f"--processes: {text!r} is not a number of processes; give 2 to "
            f"{_MOST_PROCESSES}, several with commas between"
        )
    return int(text)


def _size(text):
    match = re.fullmatch(r"(\d+) *([kmg]?)(?:i?b)?", text.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size <= 0:
        raise UsageError(
            f"--sizes: {text!r} is not a positive number of bytes; give such as 256, "
            f"64KiB or 1MiB"
        )
    return size


def _op(text):
    if text not in collectives.OPS:
        raise UsageError(
            f"--ops: {text!r} is unknown; choose from {', '.join(collectives.OPS)}"
        )
    return text


def _positive(given, name, unit):
    if name not in given:
        return None
    text = given[name]
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--{name}: {text!r} is not a positive number of {unit}")
    return int(text)


def _check_sequence(options):
    parts_of = {attention.SUITE: 1, masks.SUITE: masks.PARTS}
    for suite in set(parts_of) & set(options.suites):
        sequence = options.sequence or attention.SEQUENCE
        for count in options.devices_of(suite):
            parts = math.lcm(count, parts_of[suite])
            if sequence % parts:
                raise UsageError(
                    f"--sequence: {sequence} tokens cannot be split evenly over "
                    f"{count} devices by {suite}; give a multiple of {parts}"
                )
