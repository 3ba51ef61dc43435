"""Train a small language model with its sequence split over a ring of devices.

A byte-level transformer learns the Python standard library's source files (or --text)
on 8 virtual CPU devices; every byte between the devices is moved by jaxcomm. Under
python -m jaxcomm.launch it runs on the devices of all processes.
"""

import contextlib
import math
import os
import pathlib
import shlex
import sys

import jax
from absl import app, flags, logging

from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.communicator.backends import NAMES
from language_model import processes
from language_model.settings import DemoError, Settings, split_devices

_DEFAULT = Settings()
_DEFAULT_DEVICES = _DEFAULT.data * _DEFAULT.context
_INTERRUPTED = 130

_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "devices in total; default 8, or those of all processes",
    lower_bound=1,
    upper_bound=256,
)
_DATA = flags.DEFINE_integer(
    "data", None, "devices that share the batch; default: the rest", lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "devices that share a sequence; default 4", lower_bound=1
)
_SEQUENCE = flags.DEFINE_integer(
    "sequence", _DEFAULT.sequence, "bytes in a sequence", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", _DEFAULT.steps, "steps to train", lower_bound=1)
_TEXT = flags.DEFINE_string(
    "text", None, "file or folder to learn; default: the standard library"
)
_BACKEND = flags.DEFINE_enum(
    "backend", None, NAMES, "what moves the bytes; default: the platform's own"
)
_SCHEDULE = flags.DEFINE_enum(
    "schedule", _DEFAULT.schedule, sorted(SCHEDULES), "how the ring deals a sequence"
)
_SEED = flags.DEFINE_integer(
    "seed",
    _DEFAULT.seed,
    "of parameters, batches and generation",
    lower_bound=0,
    upper_bound=2**63 - 1,
)
_OUTPUT = flags.DEFINE_string(
    "output", str(_DEFAULT.output), "folder for checkpoints and the loss curve"
)
_RESUME = flags.DEFINE_bool(
    "resume", False, "continue from the latest checkpoint in --output"
)
_LAYERS = flags.DEFINE_integer("layers", _DEFAULT.layers, "of the model", lower_bound=1)
_WIDTH = flags.DEFINE_integer(
    "width", _DEFAULT.width, "of the model, a multiple of 8", lower_bound=8
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", _DEFAULT.learning_rate, "of AdamW")
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", _DEFAULT.checkpoint_every, "steps between saves", lower_bound=1
)
_CHECK = flags.DEFINE_bool(
    "check", None, "compare the first losses with one device; default: if it fits"
)


def settings_from_flags() -> Settings:
    """Return the settings that the flags ask for.

    Raises:
      DemoError: they contradict each other or are out of range.
    """
    if _WIDTH.value % 8:
        raise DemoError(
            f"--width={_WIDTH.value} is not a multiple of 8: 4 heads of an even size"
        )
    if not 0 < _LEARNING_RATE.value < math.inf:
        raise DemoError(f"--learning_rate={_LEARNING_RATE.value} is not positive")
    for flag in (_TEXT, _OUTPUT):
        if flag.value == "":
            raise DemoError(f"--{flag.name} is empty; name a path, or leave it out")
    # Last: it may have to start the devices.
    data, context = split_devices(
        _DEVICES.value, _DATA.value, _CONTEXT.value, default=_device_count()
    )
    return Settings(
        data=data,
        context=context,
        sequence=_SEQUENCE.value,
        steps=_STEPS.value,
        text=None if _TEXT.value is None else pathlib.Path(_TEXT.value),
        backend=_BACKEND.value,
        schedule=_SCHEDULE.value,
        seed=_SEED.value,
        output=pathlib.Path(_OUTPUT.value),
        resume=_RESUME.value,
        layers=_LAYERS.value,
        width=_WIDTH.value,
        learning_rate=_LEARNING_RATE.value,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        check=_CHECK.value,
    )


def _device_count() -> int:
    return jax.device_count() if processes.count() > 1 else _DEFAULT_DEVICES


def _fail(message: object, status: int) -> int:
    print(f"demo: {message}", file=sys.stderr)
    return status


def _fail_together(message: object, status: int) -> int:
    # It happened in every process alike; the first speaks for all.
    return _fail(message, status) if processes.is_first() else status


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit status.

    Raises:
      KeyboardInterrupt: pressed before training, or twice.
    """
    if argv[1:]:
        return _fail(f"unexpected argument {argv[1]!r}; see --help", 2)
    try:
        settings = settings_from_flags()
        # Late: bad flags are told of before seconds of imports.
        from language_model.interrupt import Interrupted
        from language_model.run import CheckFailed, run
    except DemoError as error:
        return _fail(error, 2)
    except ImportError as error:
        return _fail(f"{error}; install it with: pip install 'jaxcomm[demo]'", 2)
    try:
        run(settings)
    except DemoError as error:
        return _fail(error, 2)
    except CheckFailed as error:
        return _fail_together(error, 1)
    except Interrupted as error:
        again = shlex.join([f for f in sys.argv[1:] if f != "--resume"] + ["--resume"])
        command = f"python -m language_model {again}"
        if processes.count() > 1:
            command = "the same command with --resume"
        return _fail_together(f"{error}. Go on: {command}", _INTERRUPTED)
    return 0


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_fail(f"{error}; see --help", 2))
    except SystemExit:
        # --help and its kin end the parsing so; absl would call that a failure.
        sys.exit(0)


def _main(argv: list[str]) -> int:
    # Absl has raised it to INFO, at which jax tells how its processes meet.
    if flags.FLAGS.verbosity == logging.INFO:
        logging.set_verbosity(logging.WARNING)
    try:
        return main(argv)
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
    app.run(_main, flags_parser=_parse)
