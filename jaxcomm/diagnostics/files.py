"""The files of a job: flight records, those of launchers, and what NCCL does."""

import dataclasses
import os
import socket
import time
from collections.abc import Iterable, Sequence

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics import lines, of_nccl, programs, record, ring, seen
from jaxcomm.diagnostics.merge import Merged, merge
from jaxcomm.diagnostics.programs import Program
from jaxcomm.diagnostics.record import ProcessRecord, RecordError
from jaxcomm.diagnostics.ring import Ring
from jaxcomm.diagnostics.seen import Seen


def merge_files(paths: Iterable[str | os.PathLike]) -> Merged:
    """Compares flight records, one file of each process.

    A file that is no flight record is left out, and named in ``skipped``.

    Args:
      paths: files that failures, SIGUSR1 or ``FlightRecord.save`` wrote, those of
        launchers, and those in which ``launch --watch`` keeps what NCCL does.

    Raises:
      RecordError: no file is of a process or a launcher, or they are not of one job.

    Example:
      >>> merge_files(sorted(folder.glob("flight-record-*.json")))  # doctest: +SKIP
    """
    path_of: dict[int, str] = {}
    records: dict[int, ProcessRecord] = {}
    by_launchers: list[Seen] = []
    skipped: list[str] = []
    rings: dict[int, Ring] = {}
    compiled: dict[int, Sequence[Program] | None] = {}
    for path in paths:
        try:
            if os.fspath(path).endswith(ring.SUFFIX):
                kept = ring.load(path)
                rings[kept.process] = kept
                compiled[kept.process] = programs.beside(path, kept.pid)
                continue
            found = _load(path)
        except RecordError as error:
            skipped.append(str(error))
            continue
        name = table.plain(os.fspath(path))
        if isinstance(found, list):
            by_launchers += found
            continue
        if found.process in records:
            raise RecordError(
                f"{path_of[found.process]} and {name} are both of process "
                f"{found.process}; give one record of each process"
            )
        for process, other in records.items():
            if other.processes != found.processes:
                raise RecordError(
                    f"{name} is of a job of {found.processes} processes and "
                    f"{path_of[process]} of one of {other.processes}; give the records "
                    f"of one job"
                )
        path_of[found.process] = name
        records[found.process] = found
    told = [*rings.values()]
    named = lines.of_rings(told, compiled)
    for found in of_nccl.records(told, socket.gethostname(), time.time(), named):
        records[found.process] = _with_nccl(records.get(found.process), found)
    if not records and not by_launchers:
        raise RecordError("; ".join(skipped) or "no flight record was given")
    merged = merge(records.values(), by_launchers)
    return dataclasses.replace(merged, skipped=skipped)


def _with_nccl(own: ProcessRecord | None, found: ProcessRecord) -> ProcessRecord:
    """Returns a process's record with what NCCL's callbacks tell of it."""
    if own is None or own.processes != found.processes:
        return found
    return dataclasses.replace(
        own, communicators=(*own.communicators, *found.communicators)
    )


def _load(path) -> ProcessRecord | list[Seen]:
    document = record.load_json(path)
    if seen.is_of_launcher(document):
        return record.named(path, seen.parse, document)
    return record.named(path, record.parse, document)
