"""Numbers as people read them."""


def seconds(value: float) -> str:
    """Return a time with its unit, three digits.

    >>> seconds(71.3e-6), seconds(0.00179), seconds(2.5)
    ('71.3 us', '1.79 ms', '2.5 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 999.5:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value)} s"


def size(count: int) -> str:
    """Return a number of bytes in powers of 1024.

    >>> size(256), size(65536), size(16 << 20)
    ('256 B', '64 KiB', '16 MiB')
    """
    value: float = count
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} GiB"


def rate(per_second: float, unit: str) -> str:
    """Return bytes or operations per second in powers of 1000.

    >>> rate(9.8e9, "bytes"), rate(7.2e6, "bytes"), rate(4.13e11, "FLOP")
    ('9.8 GB/s', '7.2 MB/s', '413 GFLOP/s')
    """
    symbol = "B" if unit == "bytes" else unit
    for prefix, factor in (("k", 1e3), ("M", 1e6)):
        if per_second < 999.5 * factor:
            return f"{_digits(per_second / factor)} {prefix}{symbol}/s"
    return f"{_digits(per_second / 1e9)} G{symbol}/s"


def percent(share: float) -> str:
    """Return a share of one as percent, small ones with a digit more.

    >>> percent(0.52), percent(0.0123), percent(1e-6)
    ('52 %', '1.2 %', '< 0.1 %')
    """
    if abs(share) < 0.0005:
        return "< 0.1 %" if share > 0 else "0.0 %"
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def _digits(value):
    """Return three significant digits, without an exponent where there is room."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
