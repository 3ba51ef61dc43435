"""Bugs of NCCL that its later versions mended, as its release notes tell."""

import platform
from collections.abc import Iterator
from typing import NamedTuple

from jaxcomm.communicator.backends.nccl import library
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
