"""The machine: processor, memory, and where its bounds are."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxcomm.communicator import text_table as table
from jaxcomm.doctor.rows import Row

# What some container runtimes give.
_SMALL_SHARED_MEMORY = 64 << 20


def machine() -> Iterator[Row]:
    """Yield processor, memory and system."""
    yield Row("system", platform.platform())
    yield Row("cpu", _processor())
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _file("huge pages", "/sys/kernel/mm/transparent_hugepage/enabled")
    yield _file(
        "huge pages, shared", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )


def _shared_memory():
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Row("/dev/shm", f"not there: {error.strerror}", {"bytes": 0, "free": 0})
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{table.size(free)} free of {table.size(total)}"
    if total <= _SMALL_SHARED_MEMORY:
        text += "; a container can be given more (docker: --shm-size)"
    return Row("/dev/shm", text, {"bytes": total, "free": free})


def _cores():
    affinity = getattr(os, "sched_getaffinity", None)
    total = os.cpu_count()
    allowed = len(affinity(0)) if affinity else total
    value: dict[str, Any] = {"cores": total, "allowed": allowed}
    text = f"{total}, {allowed} of them for this process"
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        value["quota"] = int(quota) / int(period)
        text += f"; its container may use {value['quota']:g} at a time"
    return Row("cores", text, value)


def _memory():
    total = _pages("SC_PHYS_PAGES")
    if total is None:
        return Row("memory", "unknown")
    free = _pages("SC_AVPHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    value = {"bytes": total, "available": free}
    of = "" if free is None else f"{table.size(free)} available of "
    text = of + table.size(total)
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdecimal() and int(limit) < total:
        value["limit"] = int(limit)
        text += f"; its container may use {table.size(int(limit))}"
    return Row("memory", text, value)


def _pages(name):
    # Each system has counts of its own.
    if name not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)


def _processor():
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, text = line.partition(":")
        if key.strip() == "model name":
            return text.strip()
    return platform.machine()


def _file(name, path):
    return Row(name, _read(path) or "unknown")


def _read(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
