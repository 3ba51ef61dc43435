"""Run ``python -m stress``: see ``--help``."""

import argparse
import sys

from jaxcomm.launch import run
from jaxcomm.launch.options import Options

_DESCRIPTION = """\
Calls collectives at random, in an order that all processes share, with fresh numbers
each time; compares every result with numpy's, and watches memory. The status is 1 if a
result is wrong, a collective fails or memory grows.
"""


def main() -> int:
    """Start the processes, and return the first failure's status."""
    given = _arguments()
    return run.run(
        Options(
            processes=given.processes,
            devices_per_process=given.devices_per_process,
            module=True,
            script="stress.worker",
            arguments=(str(given.operations), str(given.programs), str(given.seed)),
            platform="cpu",
            prefix=False,
        )
    )


def _arguments():
    parser = argparse.ArgumentParser(
        prog="python -m stress",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, about in (
        ("operations", 100_000, "how many calls"),
        ("processes", 2, "how many processes"),
        ("devices-per-process", 1, "virtual devices of each"),
        ("programs", 40, "different programs; each takes time to compile"),
        ("seed", 1, "for everything that is chosen"),
    ):
        parser.add_argument(
            f"--{name}", type=_positive, default=default, metavar="N", help=about
        )
    return parser.parse_args()


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
