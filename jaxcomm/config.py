"""The environment variables this package reads, all of them.

None changes a result. ``JAXCOMM_BACKEND``, ``JAXCOMM_CHECK`` and ``JAXCOMM_CHECKSUMS``
are read when the package is imported, the others when a communicator is created.

``JAXCOMM_BACKEND``
    Backend of calls for which nobody chose one: ``host``, ``nccl``, ``xla``. With
    ``xla``, only the calls themselves and :func:`jaxcomm.using` may choose another:
    programs are portable, and that is settled before their devices are known.
    Default: by platform.
``JAXCOMM_TIMEOUT``
    Seconds a rank waits for the others before it raises. Default: 300.
``JAXCOMM_NCCL_LIBRARY``
    Path of the libnccl to load. Default: the one XLA uses. A stand-in that works on
    host memory also serves CPU devices, if you ask for ``backend="nccl"``.
``JAXCOMM_MAX_COMMUNICATORS``
    The most live communicators. Creating another raises. Default: 256.
``JAXCOMM_CHECK``
    1: ranks compare what they call before each call of the ``nccl`` backend. They wait
    for one another on the host. If they differ, all raise and name the odd rank. NCCL
    compares nothing. Use it to find such a mistake: every call waits for all earlier
    work of its device. Attention raises on every backend if a rank does not hold the
    tokens that its layout says, by a callback. Set it alike on all processes.
    Default: 0.
``JAXCOMM_CHECKSUMS``
    1: every program records a checksum of each collective's operands and results, for
    :func:`jaxcomm.checksums.save`. Set it alike on all processes. Default: 0, which
    adds nothing to programs.
``JAXCOMM_DUMP_DIR``
    Folder for flight records, made if it is missing. Process ``i`` writes
    ``flight-record-<i>.json`` there when a collective fails, when the program ends by
    an exception, when one of several processes ends, and on SIGUSR1. It overwrites an
    older one. Default: no files, and SIGUSR1 prints to stderr.
``JAXCOMM_LAUNCHED``
    1: ``python -m jaxcomm.launch`` reads the flight records and says what they tell, so
    processes do not. Default: 0.
``JAXCOMM_ENDED``
    File that names processes that have ended, on any host. ``python -m jaxcomm.launch
    --elastic`` sets it.
``JAXCOMM_ELASTIC``
    1: processes go on when others end, as ``python -m jaxcomm.launch --elastic`` says.
    jaxcomm raises where XLA's collectives would have to serve several processes in
    place of its own, since survivors hang in them. Default: 0.
``JAXCOMM_STARTS``
    How often this process was started again, while others went on: they take it in by
    :func:`jaxcomm.grow`. ``python -m jaxcomm.launch --rejoin`` sets it. Default: 0.
"""

import os

# Read once: programs that are traced must not depend on when.
# The backend asked for, None if the platform is to choose.
BACKEND = os.environ.get("JAXCOMM_BACKEND") or None
CHECK = os.environ.get("JAXCOMM_CHECK") or "0"
CHECKSUMS = os.environ.get("JAXCOMM_CHECKSUMS") or "0"

DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_MAX_COMMUNICATORS = 256


def timeout_seconds() -> float:
    """Return how long a rank waits for the others, in seconds.

    Raises:
      ValueError: if ``JAXCOMM_TIMEOUT`` is not a positive number.
    """
    return _positive("JAXCOMM_TIMEOUT", DEFAULT_TIMEOUT_SECONDS, float, "seconds")


def max_communicators() -> int:
    """Return the largest number of live communicators.

    Raises:
      ValueError: if ``JAXCOMM_MAX_COMMUNICATORS`` is not a positive integer.
    """
    return _positive(
        "JAXCOMM_MAX_COMMUNICATORS", DEFAULT_MAX_COMMUNICATORS, int, "communicators"
    )


def check() -> bool:
    """Return whether ranks compare their calls over NCCL.

    Raises:
      ValueError: if ``JAXCOMM_CHECK`` is neither 0 nor 1.
    """
    return _flag("JAXCOMM_CHECK", CHECK)


def checksums() -> bool:
    """Return whether programs record checksums of what collectives take and return.

    Raises:
      ValueError: if ``JAXCOMM_CHECKSUMS`` is neither 0 nor 1.
    """
    return _flag("JAXCOMM_CHECKSUMS", CHECKSUMS)


def is_launched() -> bool:
    """Return whether a launcher reads the flight records."""
    return os.environ.get("JAXCOMM_LAUNCHED") == "1"


def nccl_library() -> str | None:
    """Return the path of the libnccl to load, None for the one XLA uses."""
    return os.environ.get("JAXCOMM_NCCL_LIBRARY") or None


def dump_dir() -> str | None:
    """Return the absolute path of the folder for flight records, None for none."""
    text = os.environ.get("JAXCOMM_DUMP_DIR")
    if not text:
        return None
    # Absolute: the program may change its folder before it fails.
    path = os.path.abspath(text)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        if os.access(path, os.W_OK | os.X_OK):
            return path
        reason = "it cannot be written to"
    raise ValueError(
        f"JAXCOMM_DUMP_DIR is {text!r}: {reason}. Name a folder for flight records, or "
        f"unset it for none."
    )


def ended_file() -> str | None:
    """Return the path of the file that names processes that have ended, if any does."""
    return os.environ.get("JAXCOMM_ENDED") or None


def is_elastic() -> bool:
    """Return whether processes of this job go on when others end.

    Raises:
      ValueError: if ``JAXCOMM_ELASTIC`` is neither 0 nor 1.
    """
    return _flag("JAXCOMM_ELASTIC", os.environ.get("JAXCOMM_ELASTIC") or "0")


def starts() -> int:
    """Return how often this process was started again while others went on.

    Raises:
      ValueError: if ``JAXCOMM_STARTS`` is no whole number.
    """
    text = os.environ.get("JAXCOMM_STARTS") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"JAXCOMM_STARTS is {text!r}, and must be a whole number")
    return int(text)


def is_in_range(value: float) -> bool:
    """Return whether a timeout or a bound is positive and finite: every wait ends.

    >>> is_in_range(300), is_in_range(0), is_in_range(float("nan"))
    (True, False, False)
    """
    return 0 < value < 1e9  # also refuses NaN, which compares false


def _flag(name, text):
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _positive(name, default, kind, unit):
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not is_in_range(value):
        raise ValueError(
            f"{name} is {text!r}; it must be a positive number of {unit}. "
            f"Unset it for the default, {default}."
        )
    return value
