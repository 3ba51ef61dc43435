"""Flight records written by hand: what a job of several processes left behind."""

import collections
import json

import pytest

from jaxcomm.diagnostics.merge import merge_files

NOW = 1_700_000_000.0


class Job:
    """Records of a job whose ranks did what :meth:`did` was told.

    Every call is a second later than the one before. Unless told otherwise there is one
    group of four devices, two of each of two processes.
    """

    def __init__(self, folder, devices=None, groups=None, forget=0, backend="host"):
        self.folder = folder
        self.backend = backend
        self.devices = devices or {0: [0, 1], 1: [2048, 2049]}
        everybody = [device for own in self.devices.values() for device in own]
        self.groups = groups or [everybody]
        # How many of each rank's first operations the ring has overwritten.
        self.forget = forget
        self.entries = collections.defaultdict(list)
        self.counts = collections.Counter()
        self.time = NOW
        # By process: its host, and how far its clock is ahead.
        self.hosts = {}
        self.wrong = {}

    def did(
        self, ranks, operation, state="completed", *, site="a", run=1, group=0,
        axes="('i',)", platform="cpu", signature=None, seconds=0.5,
    ):  # fmt: skip
        """Adds one operation of each of some ranks."""
        name, _, operands = operation.removesuffix(")").partition("(")
        for rank in [ranks] if isinstance(ranks, int) else ranks:
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
                "signature": signature or operation, "state": state,
                "started": self.time,
                "seconds": None if state == "started" else seconds,
            })  # fmt: skip
        self.time += 1
        return self

    def document(self, process):
        """Returns the record of one process."""
        ahead = self.wrong.get(process, 0)
        communicators = [
            {
                "key": f"{hash(axes) % 2**64:016x}", "axes": axes, "lane": "default",
                "backend": self.backend, "platform": platform, "groups": self.groups,
                "timeout_seconds": 300.0,
                "entries": [e | {"started": e["started"] + ahead} for e in entries],
            }
            for (owner, axes, platform), entries in self.entries.items()
            if owner == process
        ]  # fmt: skip
        return {
            "version": 1, "process": process, "processes": len(self.devices),
            "pid": 100 + process, "host": self.hosts.get(process, "node7"),
            "time": self.time + ahead,
            "reason": "timeout", "devices": {"cpu": self.devices[process]},
            "communicators": communicators,
        }  # fmt: skip

    def write(self, *processes):
        """Writes the records of some processes, or of all; returns the files."""
        paths = []
        for process in processes or self.devices:
            path = self.folder / f"flight-record-{process}.json"
            path.write_text(json.dumps(self.document(process)))
            paths.append(path)
        return paths

    def merged(self, *processes):
        """Merges the records of some processes, or of all."""
        return merge_files(self.write(*processes))

    def texts(self, *processes):
        """Returns what :meth:`merged` finds wrong, as text."""
        return [finding.text for finding in self.merged(*processes).findings]


@pytest.fixture
def make_job(tmp_path):
    """Returns ``make_job(devices, groups)``; see :class:`Job`."""

    def make(**options):
        return Job(tmp_path, **options)

    return make


@pytest.fixture
def job(make_job):
    """A job of two processes with two devices each, in one group."""
    return make_job()
