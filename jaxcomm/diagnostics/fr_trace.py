"""Flight records as torch's flight recorder writes them, for its analyzer.

``torchfrtrace FOLDER`` reads one pickle for each rank, named ``<prefix><rank>``: the
groups with their ranks, and the rank's last operations. This is what its modules
``loader``, ``builder``, ``utils`` and ``types`` of PyTorch 2.15 read, in
``torch/distributed/flight_recorder/components``.
"""

import collections
import math
import os
import pathlib
import pickle
import re
from typing import Any

from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.merge import Merged
from jaxcomm.diagnostics.timeline import Bar, timeline

PREFIX = "jaxcomm_rank_"
# Of torch's format. All ranks must have the same.
_VERSION = "2.10"
# The analyzer knows torch's collectives alone. For ours that it has none of: the one
# whose operands and results are as large.
_NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "permute": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "scan": "all_reduce",
    "check_positions": "barrier",
}
_OPERAND = re.compile(r"(\w+)\[([\d,]*)\]")


def save(merged: Merged, folder: str | os.PathLike) -> None:
    """Write one file for each rank; ranks are global device ids.

    Operations of several ranks have one sequence number, whatever order each rank took.

    Raises:
      OSError: if a file cannot be written.
      ValueError: if no operation is on record, if some are of CPUs and some of GPUs,
        whose device ids are the same, or if the folder has files of other ranks.
    """
    found = timeline(merged)
    platforms = sorted({group.communicator.platform for group in merged.groups})
    if len(platforms) > 1:
        raise ValueError(
            f"fr_trace: the records are of devices of {platforms}, whose ids are the "
            f"same, and torch's analyzer knows a rank by one number. Save the record "
            f"of one communicator: jaxcomm.flight_record(communicator)."
        )
    sequence_of = {
        id(bar): sequence
        for sequence, bars in enumerate(found.together, 1)
        for bar in bars
    }
    entries = collections.defaultdict(list)
    for bar in found.bars:
        if id(bar) in sequence_of:
            entries[bar.entry.device].append((bar, sequence_of[id(bar)]))
    configs = collections.defaultdict(dict)
    for group in merged.groups:
        name, desc = _names(group.communicator, group.index)
        config = {"name": name, "desc": desc, "ranks": str(list(group.devices))}
        for rank, device in enumerate(group.devices):
            if group.process_of[rank] in group.recorded:
                configs[device][name] = config
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"{PREFIX}{device}" for device in configs}
    strange = sorted(path.name for path in folder.glob(f"{PREFIX}*"))
    if strange := [name for name in strange if name not in names]:
        raise ValueError(
            f"fr_trace: {folder} has files of other ranks, {', '.join(strange)}, which "
            f"torch's analyzer would take for ranks of this job. Name another folder."
        )
    # Also of a rank that has done nothing: a missing file would be a missing record.
    for device, config in configs.items():
        dump = {
            "version": _VERSION,
            "pg_config": config,
            "pg_status": {},
            "entries": _entries(entries[device]),
        }
        (folder / f"{PREFIX}{device}").write_bytes(pickle.dumps(dump, protocol=4))


def _names(communicator: record.CommunicatorRecord, group: int) -> tuple[str, str]:
    return f"{communicator.key}.{group}", communicator.title


def _entries(own: list[tuple[Bar, int]]) -> list[dict[str, Any]]:
    # As torch counts: also what the ring has forgotten, on each communicator.
    first: dict[str, int] = {}
    for bar, _ in own:
        key = bar.communicator.key
        first[key] = min(first.get(key, bar.entry.sequence), bar.entry.sequence)
    forgotten = sum(sequence - 1 for sequence in first.values())
    return [
        _entry(bar, sequence, forgotten + i) for i, (bar, sequence) in enumerate(own)
    ]


def _entry(bar: Bar, sequence: int, number: int) -> dict[str, Any]:
    entry = bar.entry
    size = len(bar.communicator.groups[entry.group])
    operands = _OPERAND.findall(entry.operands)
    dtypes = [dtype for dtype, _ in operands]
    shapes = [[int(n) for n in shape.split(",") if n] for _, shape in operands]
    is_done = entry.state == record.COMPLETED
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": _names(bar.communicator, entry.group),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "is_p2p": False,
        "profiling_name": f"nccl:{_NAMES.get(entry.collective, entry.collective)}",
        # The only text of ours that the analyzer shows.
        "frames": [{"name": entry.operation, "filename": "jaxcomm", "line": 0}],
        "input_sizes": shapes,
        "input_dtypes": dtypes,
        "output_sizes": [_result(entry.collective, shape, size) for shape in shapes],
        "output_dtypes": dtypes,
        # torch has no word for failed: an operation has completed, or it has not.
        "state": "completed" if is_done else "started",
        "time_created_ns": _nanoseconds(bar.start),
        "time_discovered_started_ns": _nanoseconds(bar.start),
        "time_discovered_completed_ns": _nanoseconds(bar.end) if is_done else None,
        "duration_ms": (bar.end - bar.start) * 1e3 if is_done else None,
        "timeout_ms": round(bar.communicator.timeout_seconds * 1e3),
        "retired": entry.state != record.STARTED,
    }


def _result(collective: str, shape: list[int], size: int) -> list[int]:
    """Return a shape with as many elements as the result has."""
    if collective in ("all_gather", "gather"):
        return [size, *shape]
    if collective in ("reduce_scatter", "scatter"):
        return [math.prod(shape) // size]
    return shape


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
