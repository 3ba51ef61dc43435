"""The strategies that can be asked for by name."""

from collections.abc import Callable

from jaxcomm.attention.problem import Problem
from jaxcomm.attention.strategies.all_gather import AllGather
from jaxcomm.attention.strategies.halo import Halo
from jaxcomm.attention.strategies.ring import Ring
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.attention.strategies.ulysses import Ulysses
from jaxcomm.attention.strategies.usp import Usp

# A new strategy is one file and one entry here: a function of the problem.
STRATEGIES: dict[str, Callable[[Problem], Strategy]] = {
    "ring": lambda problem: Ring(),
    "all_gather": lambda problem: AllGather(),
    "ulysses": lambda problem: Ulysses(problem.size),
    "usp": Usp.of,
    "halo": lambda problem: Halo(),
}


def get_strategy(
    strategy: str | Strategy, problem: Problem, what: str = "ring_attention"
) -> Strategy:
    """Return the strategy of that name, or the argument if it is one already.

    Args:
      strategy: a name, or a strategy.
      problem: what it is to compute.
      what: the function that was called.

    Raises:
      ValueError: no strategy has that name, or it cannot compute this.
      TypeError: the argument is neither a name nor a strategy.
    """
    names = ", ".join(map(repr, (*STRATEGIES, "auto")))
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif not isinstance(strategy, str):
        raise TypeError(
            f"{what}: strategy={strategy!r} is of type {type(strategy).__name__}. Pass "
            f"one of {names} or an instance of Strategy."
        )
    elif strategy in STRATEGIES:
        chosen = STRATEGIES[strategy](problem)
    else:
        raise ValueError(
            f"{what}: strategy={strategy!r} is not known. Pass one of {names}, or an "
            "instance of Strategy."
        )
    reason = chosen.why_not(problem)
    if reason is not None:
        raise ValueError(
            f"{what}: strategy={chosen.name!r} was asked for, but {reason}. "
            "Pass strategy='ring', or 'auto' for the best that is possible."
        )
    return chosen
