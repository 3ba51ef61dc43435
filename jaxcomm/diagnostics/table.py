"""Rows as text for a terminal and as HTML for a notebook."""

import time
from collections.abc import Iterable

from jaxcomm.communicator.text_table import as_html as as_html
from jaxcomm.communicator.text_table import digits
from jaxcomm.communicator.text_table import size as size
from jaxcomm.communicator.text_table import text as text


def duration(seconds: float) -> str:
    """Returns a time with its unit, three digits.

    >>> duration(52.1e-6), duration(0.0012), duration(12.34), duration(600)
    ('52.1 us', '1.2 ms', '12.3 s', '600 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def clock(unix_seconds: float) -> str:
    """Returns the time of day, with milliseconds."""
    thousandths = round(unix_seconds * 1000)
    whole = time.strftime("%H:%M:%S", time.localtime(thousandths // 1000))
    return f"{whole}.{thousandths % 1000:03d}"


def numbers(values: Iterable[int]) -> str:
    """Lists numbers, runs of three and more as a range.

    >>> numbers([0, 1, 2, 3, 7, 9, 8, 20])
    '0-3, 7-9, 20'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
