"""Numbers as people read them."""

from jaxcomm.communicator.text_table import digits
from jaxcomm.communicator.text_table import duration as seconds
from jaxcomm.communicator.text_table import size as size

__all__ = ["percent", "rate", "seconds", "size"]


def rate(per_second: float, unit: str) -> str:
    """Return bytes or operations per second in powers of 1000.

    >>> rate(9.8e9, "bytes"), rate(7.2e6, "bytes"), rate(4.13e11, "FLOP")
    ('9.8 GB/s', '7.2 MB/s', '413 GFLOP/s')
    """
    symbol = "B" if unit == "bytes" else unit
    for prefix, factor in (("k", 1e3), ("M", 1e6)):
        if per_second < 999.5 * factor:
            return f"{digits(per_second / factor)} {prefix}{symbol}/s"
    return f"{digits(per_second / 1e9)} G{symbol}/s"


def percent(share: float) -> str:
    """Return a share of one as percent, small ones with a digit more.

    >>> percent(0.52), percent(0.0123), percent(1e-6)
    ('52 %', '1.2 %', '< 0.1 %')
    """
    if abs(share) < 0.0005:
        return "< 0.1 %" if share > 0 else "0.0 %"
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"
