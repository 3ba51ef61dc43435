"""Broadcast arrays of fewer dimensions, whatever the user set."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


def promotes_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function broadcast arrays under ``jax_numpy_rank_promotion="raise"``.

    Positions have a dimension more where sequences of a batch differ in them, and all
    that is computed of them serves both.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **options: _P.kwargs) -> _R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **options)

    return wrapped
