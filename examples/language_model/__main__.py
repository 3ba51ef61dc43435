"""Train a small language model with its sequence split over a ring of devices.

A byte-level transformer learns the Python standard library's source files (or --text)
on 8 virtual CPU devices; every byte between the devices is moved by jaxcomm. Under
python -m jaxcomm.launch it runs on the devices of all processes.
"""

import argparse
import contextlib
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomm.attention.schedules import SCHEDULES
from jaxcomm.communicator.backends import NAMES
from language_model import processes
from language_model.settings import (
    DemoError,
    Settings,
    check_microbatches,
    split_devices,
)

_DEFAULT = Settings()
_DEFAULT_DEVICES = _DEFAULT.data * _DEFAULT.context
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise DemoError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m language_model",
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name, about, kind: Callable[[str], Any] = str, **more):
        parser.add_argument(f"--{name}", type=kind, help=about, **more)

    positive = _integer(1)
    add(
        "devices",
        "devices in total; default 8, or the devices of all processes",
        _integer(1, 256),
    )
    add("data", "devices that share the batch; default: the rest", positive)
    add("context", "devices that share a sequence; default 4", positive)
    add(
        "microbatches",
        "sequences in a step, for the same bits on any number of --data devices",
        positive,
    )
    add("sequence", "bytes in a sequence", positive)
    add("steps", "steps to train", positive)
    add("text", "file or folder to learn; default: the standard library")
    add("backend", "what moves the bytes; default: the platform's own", choices=NAMES)
    add("schedule", "how the ring deals a sequence", choices=sorted(SCHEDULES))
    add("seed", "of parameters, batches and generation", _integer(0, 2**63 - 1))
    add("output", "folder for checkpoints and the loss curve")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in --output",
    )
    add("layers", "of the model", positive)
    add("width", "of the model, a multiple of 8", _integer(8))
    add("window", "tokens that each second layer sees", positive)
    add(
        "dtype",
        "that the layers compute in; bfloat16 is what FlashAttention-3 takes",
        choices=("float32", "bfloat16"),
    )
    add("learning_rate", "of AdamW", float)
    add("checkpoint_every", "steps between saves", positive)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the first losses with one device; default: if it fits",
    )
    parser.add_argument(
        "--nocheck", dest="check", action="store_false", help="do not compare"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="if a process ends, go on with fewer sequences in a batch; for launch "
        "--elastic, compares nothing",
    )
    parser.set_defaults(
        **{
            name: getattr(_DEFAULT, name)
            for name in (
                "sequence", "steps", "schedule", "seed", "output", "layers", "width",
                "window", "dtype", "learning_rate", "checkpoint_every",
            )
        },
        check=None,
    )  # fmt: skip
    return parser


def _integer(least: int, most: float = math.inf):
    def read(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            bounds = f"from {least} on" if most == math.inf else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return value

    return read


def _fix_threads() -> None:
    """Give XLA's CPU client so many threads as serve 16 devices, if it is not there.

    Their number decides in how many parts XLA adds a matrix product.
    """
    os.environ.setdefault("PJRT_NPROC", "32")


def read(words: Sequence[str]) -> Settings:
    """Return the settings that a command line asks for.

    Raises:
      DemoError: the options contradict each other or are out of range.
      SystemExit: with status 0, after printing the help.
    """
    given = _parser().parse_args(words)
    if given.width % 8:
        raise DemoError(
            f"--width={given.width} is not a multiple of 8: 4 heads of an even size"
        )
    if not 0 < given.learning_rate < math.inf:
        raise DemoError(f"--learning_rate={given.learning_rate} is not positive")
    for name in ("text", "output"):
        if getattr(given, name) == "":
            raise DemoError(f"--{name} is empty; name a path, or leave it out")
    if given.elastic and given.microbatches:
        raise DemoError(
            "--elastic with --microbatches: fewer processes may not share them evenly. "
            "Leave one of the two out"
        )
    if given.microbatches:
        _fix_threads()
    # Last: it may have to start the devices.
    data, context = split_devices(
        given.devices, given.data, given.context, default=_device_count()
    )
    check_microbatches(given.microbatches, data)
    return Settings(
        data=data,
        microbatches=given.microbatches,
        context=context,
        sequence=given.sequence,
        steps=given.steps,
        text=None if given.text is None else pathlib.Path(given.text),
        backend=given.backend,
        schedule=given.schedule,
        seed=given.seed,
        output=pathlib.Path(given.output),
        resume=given.resume,
        layers=given.layers,
        width=given.width,
        window=given.window,
        dtype=given.dtype,
        learning_rate=given.learning_rate,
        checkpoint_every=given.checkpoint_every,
        check=False if given.elastic else given.check,
        elastic=given.elastic,
    )


def _device_count() -> int:
    return jax.device_count() if processes.count() > 1 else _DEFAULT_DEVICES


def _fail(message: object, status: int) -> int:
    print(f"demo: {message}", file=sys.stderr)
    return status


def _fail_together(message: object, status: int) -> int:
    # It happened in every process alike; the first speaks for all.
    return _fail(message, status) if processes.is_first() else status


def main(words: Sequence[str]) -> int:
    """Run the demo; return the exit status.

    Raises:
      KeyboardInterrupt: pressed before training, or twice.
    """
    try:
        settings = read(words)
    except DemoError as error:
        return _fail(f"{error}; see --help", 2)
    try:
        # Late: bad options are reported before seconds of imports.
        from language_model.interrupt import Interrupted
        from language_model.run import CheckFailed, run
    except ImportError as error:
        return _fail(f"{error}; install it with: pip install 'jaxcomm[demo]'", 2)
    try:
        run(settings)
    except DemoError as error:
        return _fail(error, 2)
    except CheckFailed as error:
        return _fail_together(error, 1)
    except Interrupted as error:
        again = [*(word for word in words if word != "--resume"), "--resume"]
        command = f"python -m language_model {shlex.join(again)}"
        if processes.count() > 1:
            command = "the same command with --resume"
        return _fail_together(f"{error}. Go on: {command}", _INTERRUPTED)
    return 0


def _main(words: Sequence[str]) -> int:
    try:
        return main(words)
    except KeyboardInterrupt:
        status = _fail("interrupted", _INTERRUPTED)
        # Threads of XLA that still compile crash a Python that shuts down.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            if jax.distributed.is_initialized():
                jax.distributed.shutdown()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
