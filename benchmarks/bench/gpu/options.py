"""The flags of ``python -m bench gpu``."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from bench.gpu.parts import PARTS
from bench.gpu.sizes import THOROUGH, Sizes
from bench.options import UsageError, check_writable

_DESCRIPTION = """\
Collectives over NCCL on the GPUs of this machine, timed against XLA's own, taking turns
in one run. `python -m pytest tests/gpu` checks that they are right. Each row is printed
to stderr when it is there, a table last. The status is 0, also where a time is not what
was asked; 1 if something is wrong or fails; 2 for what cannot be done.

With JAXCOMM_NCCL_LIBRARY naming the tests' stand-in for NCCL, CPU devices serve as the
GPUs and all sizes are tiny: that shows that everything works, not how fast it is."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
      ranks: GPUs, or processes that share one.
      processes: how many to start; 1 starts none.
      one_gpu: whether all processes use GPU 0.
      only: keys of ``PARTS``, in their order.
      tokens: as in ``Sizes``; if None, the usual ones.
      json: file to write. If None, none.
    """

    ranks: int
    processes: int
    one_gpu: bool
    only: tuple[str, ...]
    tokens: tuple[int, ...] | None = None
    json: str | None = None

    def sizes(self, usual: Sizes) -> Sizes:
        """Returns the usual sizes but for what was asked."""
        piece = 2 * self.ranks
        # Rounded up to what can be dealt to the ranks.
        dealt = tuple(-(-tokens // piece) * piece for tokens in usual.tokens)
        return dataclasses.replace(usual, tokens=self.tokens or dealt)


def parse(words: Sequence[str]) -> Options:
    """Reads a command line; ends the process for help, and for what is no number.

    Raises:
      UsageError: something in it cannot be done.
    """
    given = vars(_parser().parse_args(words))
    only = given["only"] or tuple(PARTS)
    for name in only:
        if name not in PARTS:
            raise UsageError(
                f"--only: there is no part {name!r}; choose from {', '.join(PARTS)}"
            )
    given["only"] = tuple(name for name in PARTS if name in only)
    if given.pop("thorough"):
        if given["tokens"]:
            raise UsageError("--thorough says which --tokens; leave one of them out")
        given["tokens"] = THOROUGH
    if given["json"]:
        check_writable("json", given["json"])
    ranks = given["ranks"]
    if ranks < 2:
        raise UsageError("--ranks: one rank has nobody to talk to; give 2 or more")
    if given["processes"] is None:
        given["processes"] = ranks if given["one_gpu"] else 1
    processes = given["processes"]
    if processes < 1 or ranks % processes:
        raise UsageError(
            f"--processes: {ranks} ranks cannot be split evenly over {processes} "
            "processes"
        )
    if given["one_gpu"] and processes != ranks:
        raise UsageError(
            f"--one-gpu: a process has one rank on a GPU, and {processes} processes "
            f"were asked for {ranks} ranks"
        )
    for tokens in given["tokens"] or ():
        if tokens < 1 or tokens % (2 * ranks):
            raise UsageError(
                f"--tokens: {tokens} cannot be dealt to {ranks} ranks; give a multiple "
                f"of {2 * ranks}"
            )
    return Options(**given)


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, kind, metavar, about in (
        ("ranks", int, "N", "GPUs to use (2)"),
        ("processes", int, "N", "start that many processes, which have as many GPUs "
         "each as make --ranks together (1: this one)"),
        ("only", _several(str), "PART,PART", f"some of {', '.join(PARTS)} (all)"),
        ("tokens", _several(int), "N,N", "lengths of ring attention (32768)"),
        ("json", str, "FILE", "file to write each row to when it is there; one that "
         "has rows of the same machine and versions keeps those that are not measured "
         "anew, each with its commit"),
    ):  # fmt: skip
        default = 2 if name == "ranks" else None
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar, help=about
        )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="sequences of 8k, 32k, 128k, 512k and 1M tokens",
    )
    parser.add_argument(
        "--one-gpu",
        action="store_true",
        help="a process for each rank, all on GPU 0: NCCL 2.30.3 or newer, and for "
        "speed a daemon of MPS",
    )
    return parser


def _several(kind: Callable):
    def read(text):
        # In the order given, each once.
        return tuple(dict.fromkeys(kind(word.strip()) for word in text.split(",")))

    return read
