"""Lanes: names of independent communicators over the same axes."""

DEFAULT_LANE = "default"


def check_lane(lane: object, what: str) -> None:
    """Raise ValueError, which calls it ``what``, unless the lane is a name.

    >>> check_lane("ring", "lane")
    >>> check_lane("", "psum: lane")
    Traceback (most recent call last):
    ValueError: psum: lane must be a non-empty string, got ''
    """
    if not isinstance(lane, str) or not lane:
        raise ValueError(f"{what} must be a non-empty string, got {lane!r}")
