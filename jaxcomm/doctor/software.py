"""Versions, devices, backends with NCCL's known bugs, and variables."""

import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jaxlib.version

import jaxcomm
from jaxcomm import compat, config
from jaxcomm._built import ABSENCE
from jaxcomm.attention.kernels import cudnn
from jaxcomm.attention.kernels.flash import kernel as flash
from jaxcomm.communicator.backends import BACKENDS, NAMES
from jaxcomm.communicator.backends.nccl import library
from jaxcomm.compat import gpus
from jaxcomm.doctor.rows import Row


class Bug(NamedTuple):
    """What goes wrong, from a version code to the one that mended it."""

    since: int
    mended: int
    text: str
    machine: str = ""  # if empty, every machine


BUGS = (
    Bug(0, 22903, "a job of many GPUs may stand still, without an error", "aarch64"),
    Bug(22902, 22903, "collectives may hang"),
    Bug(22700, 23102, "a SymmetricPool of several lanes may give wrong results"),
    Bug(22800, 23102, "with NCCL_CTA_POLICY=ZERO two ranks may hang at the first call"),
)


def known_bugs() -> Iterator[Row]:
    """Yield a row if the NCCL that is loaded has bugs that are known."""
    found = library.load()
    if isinstance(found, str):
        return
    bugs = [
        bug
        for bug in BUGS
        if bug.since <= found.version_code < bug.mended
        and bug.machine in ("", platform.machine())
    ]
    if not bugs:
        return
    mended = max(bug.mended for bug in bugs)
    version = f"{mended // 10000}.{mended // 100 % 100}.{mended % 100}"
    texts = [bug.text for bug in bugs]
    yield Row(
        "nccl, known bugs",
        f"{'; '.join(texts)}. Install NCCL {version} or newer if you meet one",
        texts,
    )


# They change what JAX finds and how it runs.
_OTHERS = ("JAX_", "XLA_FLAGS", "NCCL_")
# What jaxcomm.launch tells a program; the package does not read them.
_OF_LAUNCH = ("JAXCOMM_MAX_RESTARTS", "JAXCOMM_RESTART_COUNT", "JAXCOMM_RUN_ID")
# What the build of the package reads: see pyproject.toml.
_OF_BUILD = ("JAXCOMM_NO_EXTENSION",)


def versions() -> Iterator[Row]:
    """Yield the versions of what takes part."""
    yield Row("python", platform.python_version())
    yield Row("jax", jax.__version__)
    yield Row("jaxlib", jaxlib.version.__version__)
    yield Row("jaxcomm", jaxcomm.__version__)
    reason = f"XLA communicates: {ABSENCE}"
    yield Row("extension", reason if ABSENCE else "loaded", {"is_there": not ABSENCE})


def devices() -> Iterator[Row]:
    """Yield what JAX finds; starts its backends."""
    try:
        found = jax.devices()
    except compat.NO_DEVICES as error:
        nothing = "no platform of those that JAX_PLATFORMS names"
        reason = str(error).splitlines()[0] if str(error) else nothing
        yield Row("default", f"JAX finds none: {reason}", [], False)
        return
    yield _devices("default", found)
    if found[0].platform != "cpu":
        # They are there beside an accelerator, unless JAX_PLATFORMS says otherwise.
        try:
            yield _devices("cpu", jax.devices("cpu"))
        except compat.NO_DEVICES:
            yield Row("cpu", "none: see JAX_PLATFORMS", [])
    yield Row(
        "process",
        f"{jax.process_index()} of {jax.process_count()}",
        {"index": jax.process_index(), "count": jax.process_count()},
    )


def _devices(name, found):
    kinds = ", ".join(sorted({device.device_kind for device in found}))
    text = f"{len(found)} x {found[0].platform} ({kinds})"
    return Row(name, text, [str(device) for device in found])


def backends() -> Iterator[Row]:
    """Yield which backends can be chosen, and why one cannot."""
    for backend in BACKENDS.values():
        status = backend.status()
        value = {"available": status.is_available, **status.details}
        yield Row(backend.name, status.text, value, status.is_fine)
    yield from known_bugs()
    for name, reason in (
        ("FlashAttention-3", flash.why_not_on(gpus.local())),
        ("cuDNN attention", cudnn.fused_attention_reason()),
    ):
        yield Row(
            name,
            f"unavailable: {reason}"
            if reason
            else "available, for bfloat16 and float16",
            {"available": not reason, "reason": reason},
        )


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Row]:
    """Yield the environment variables that matter, set or not."""
    known = re.findall(r"^``(JAXCOMM_\w+)``", config.__doc__ or "", re.MULTILINE)
    wrong = dict(_wrong_values(environment))
    for name in known:
        text = environment.get(name)
        if name in wrong:
            yield Row(name, wrong[name], text, False)
        else:
            yield Row(name, text or "not set", text or "")
    for name, text in sorted(environment.items()):
        if name in _OF_LAUNCH + _OF_BUILD:
            yield Row(name, text, text)
        elif name.startswith("JAXCOMM_") and name not in known:
            yield Row(
                name, f"{text!r}, but jaxcomm knows no such variable", text, False
            )
        elif name.startswith(_OTHERS):
            yield Row(name, text, text)


def _wrong_values(environment):
    checks = {
        "JAXCOMM_TIMEOUT": config.timeout_seconds,
        "JAXCOMM_MAX_COMMUNICATORS": config.max_communicators,
        "JAXCOMM_BACKEND": lambda: _check_backend(environment),
        "JAXCOMM_DUMP_DIR": lambda: _check_dump_dir(environment),
    }
    for name, check in checks.items():
        try:
            check()
        except ValueError as error:
            yield name, str(error)


def _check_backend(environment):
    name = environment.get("JAXCOMM_BACKEND")
    if name and name not in NAMES:
        raise ValueError(
            f"{name!r} is no backend; choose one of {NAMES}, or unset it to let the "
            f"platform choose"
        )
    if name and ABSENCE and name != "xla":
        raise ValueError(f"{name!r} cannot serve: {ABSENCE}. Or leave it out")


def _check_dump_dir(environment):
    """Write a file that has no name where config.dump_dir would make the folder."""
    text = environment.get("JAXCOMM_DUMP_DIR")
    if not text:
        return
    folder = os.path.abspath(text)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{text!r} cannot be written: {folder}: {error.strerror}. Name a folder "
            f"for flight records, or unset it for none."
        ) from None
