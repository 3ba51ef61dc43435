"""Memory of communicators: sizes of the extension's C++.

They are written here once more, so that a plan needs no extension. A test compares them
with the extension's.
"""

_PAGE, _LINE = 4096, 128

# Processes that can share one piece of memory: ffi/backends/host/arena_memory.h.
MOST_SHARING_PROCESSES = 64
_HEADER, _CROSSING, _SEAT = 90_240, 1408, 128
_CROSSINGS, _INLINE_BYTES = 256, 4096
_CHANNELS, _SLOTS, _SLOT_BYTES = 16, 8, 128 << 10

# Ranks of a group that the kernel for small sums serves: ffi/backends/nccl/kernels.
_MOST_ADDING_RANKS = 8


def shared_memory_bytes(processes: int) -> int:
    """Return the shared memory of processes of a host.

    >>> shared_memory_bytes(2)
    36237312
    """
    row = _up_to(8 * processes, _LINE)
    crossings = _CROSSINGS * (_CROSSING + processes * (_SEAT + row))
    slots = _CHANNELS * _SLOTS * _SLOT_BYTES
    of_each = _CROSSINGS * _INLINE_BYTES + slots
    return _up_to(_HEADER, _PAGE) + _up_to(crossings, _PAGE) + processes * of_each


def inbox_bytes(size: int) -> int:
    """Return the device memory for small sums of a group; 0 if it has none.

    >>> inbox_bytes(2), inbox_bytes(8), inbox_bytes(9)
    (8388608, 2097152, 0)
    """
    if not 2 <= size <= _MOST_ADDING_RANKS:
        return 0
    return (8 if size == 2 else 2) << 20


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
