"""Flight records written by hand: what a job of several processes left behind."""

import collections
import json

import pytest

from jaxcomm.diagnostics.files import merge_files

NOW = 1_700_000_000.0


class Job:
    """Records of a job whose ranks did what :meth:`did` was told.

    Every call is a second later than the one before. Unless told otherwise there is one
    group of four devices, two of each of two processes. Of each rank's operations the
    ring has overwritten the first, as many as to forget.
    """

    def __init__(self, folder, devices=None, groups=None, forget=0, backend="host"):
        self.folder, self.backend, self.forget = folder, backend, forget
        self.devices = devices or {0: [0, 1], 1: [2048, 2049]}
        everybody = [device for own in self.devices.values() for device in own]
        self.groups = groups or [everybody]
        self.entries = collections.defaultdict(list)
        self.counts = collections.Counter()
        self.time = NOW
        self.closed = set()

    def did(
        self, ranks, operation, state="completed", site="a", run=1, signature=None, *,
        group=0, axes="('i',)", platform="cpu", seconds=0.5,
    ):  # fmt: skip
        """Adds an operation of some ranks, "013", of float32[4] unless it says what."""
        name, _, operands = operation.removesuffix(")").partition("(")
        operands = operands or "float32[4]"
        for rank in [ranks] if isinstance(ranks, int) else map(int, ranks):
            self.counts[axes, group, rank] += 1
            device = self.groups[group][rank]
            (process,) = (p for p, own in self.devices.items() if device in own)
            sequence = self.counts[axes, group, rank]
            if sequence <= self.forget:
                continue
            self.entries[process, axes, platform].append({
                "sequence": sequence, "rank": rank,
                "group": group, "device": device, "run_id": run, "site": site,
                "collective": name, "name": name, "operands": operands,
                "dtype": operands.partition("[")[0], "bytes": 16,
                "signature": signature or f"{name}({operands})", "state": state,
                "started": self.time,
                "seconds": None if state == "started" else seconds,
            })  # fmt: skip
        self.time += 1
        return self

    def document(self, process):
        communicators = [
            {
                "key": f"{hash(axes) % 2**64:016x}", "axes": axes, "lane": "default",
                "backend": self.backend, "platform": platform, "groups": self.groups,
                "timeout_seconds": 300.0, "closed": (process, axes) in self.closed,
                "entries": entries,
            }
            for (owner, axes, platform), entries in self.entries.items()
            if owner == process
        ]  # fmt: skip
        return {
            "version": 1, "process": process, "processes": len(self.devices),
            "pid": 100 + process, "host": "node7",
            "time": self.time,
            "reason": "timeout", "devices": {"cpu": self.devices[process]},
            "communicators": communicators,
        }  # fmt: skip

    def write(self, *processes):
        paths = []
        for process in processes or self.devices:
            paths.append(self.folder / f"flight-record-{process}.json")
            paths[-1].write_text(json.dumps(self.document(process)))
        return paths

    def merged(self, *processes):
        return merge_files(self.write(*processes))


@pytest.fixture
def make_job(tmp_path):
    return lambda **options: Job(tmp_path, **options)


@pytest.fixture
def job(make_job):
    return make_job()
