"""Bus bandwidth, as NVIDIA's nccl-tests define it (doc/PERFORMANCE.md)."""

from bench.rows import TimedRow
from jaxcomm.doctor import check

_NARROW = "_bf16"


def factor(row: TimedRow) -> float | None:
    """Return bus bandwidth over size / time, None if the row is no collective."""
    found = _collective(row)
    return found.bus(row.devices) if found and found.bus else None


def size(row: TimedRow) -> int:
    """Return the bytes that nccl-tests count: of the operand, or the gathered ones."""
    found = _collective(row)
    shares = found is not None and found.shares
    return (row.payload_bytes or 0) * (row.devices if shares else 1)


def bus(row: TimedRow, seconds: float) -> float:
    """Return bytes per second that cross a link of each device.

    Args:
      row: of a collective.
      seconds: of one call.

    Raises:
      ValueError: the row is of something else.
    """
    of_bus = factor(row)
    if of_bus is None:
        raise ValueError(f"{row.name!r} is no collective with a bus bandwidth")
    return of_bus * size(row) / seconds


def at_roofline(row: TimedRow) -> float:
    """Return the bus bandwidth of a call that moves its bytes as fast as memcpy."""
    return bus(row, row.work / row.roofline_rate)


def _collective(row):
    return check.collectives(row.devices).get(row.name.removesuffix(_NARROW))
