"""What names of earlier versions are called now, for those who still write them."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

NAMES = {
    "jaxcomm.Counters": "what jaxcomm.communicators().counters is",
    "jaxcomm.Schedule": "internal: pass the name of a schedule to jaxcomm.Layout",
    "jaxcomm.axis_index": "jax.lax.axis_index",
    "jaxcomm.axis_size": "jax.lax.axis_size",
    "jaxcomm.check": "jaxcomm.raise_if_failed",
    "jaxcomm.compare_runs": "jaxcomm.checksums.compare",
    "jaxcomm.counters": "jaxcomm.communicators().counters",
    "jaxcomm.save_checksums": "jaxcomm.checksums.save",
    "jaxcomm.survivors": "jaxcomm.mesh_of_survivors",
    "jaxcomm.tree_sum": "jaxcomm.local_sum",
    "jaxcomm.attention.Tokens": "jaxcomm.Tokens",
    "jaxcomm.attention.Usp": "jaxcomm.attention.Ulysses, which takes any width",
    "jaxcomm.attention.equinox_attention": "in examples/recipes/equinox_layer.py",
    "jaxcomm.attention.segment_ids": "jaxcomm.attention.segment_ids_of",
} | {
    f"jaxcomm.attention.{name}": f"jaxcomm.attention.{room}.{name}"
    for room, names in {
        "kernels": (
            *("Block", "Coordinates", "Grads", "Hop", "Kernel", "Mask", "Saved"),
            "kernels_of",
        ),
        "state": (
            *("GatedDelta", "KimiDelta", "Mamba2"),
            *("StateKernel", "StateMap", "StateRows", "causal_halo"),
        ),
    }.items()
    for name in names
}

DROPOUT = dict.fromkeys(("dropout_rate", "dropout_key"), "dropout=(rate, key)")

# What torch.distributed and mpi4jax call what jaxcomm has.
ELSEWHERE = {
    other: here
    for here, others in {
        "jaxcomm.psum": "all_reduce allreduce",
        "jaxcomm.pbroadcast": "broadcast bcast",
        "jaxcomm.preduce": "reduce",
        "jaxcomm.all_gather": "all_gather_into_tensor allgather",
        "jaxcomm.psum_scatter": "reduce_scatter reduce_scatter_tensor",
        "jaxcomm.all_to_all": "all_to_all_single alltoall",
        "jaxcomm.pgather": "gather",
        "jaxcomm.pscatter": "scatter",
        "jaxcomm.ppermute": "send recv isend irecv sendrecv batch_isend_irecv",
        "jaxcomm.pscan": "scan",
        "jaxcomm.pbarrier": "barrier",
        "jax.lax.axis_index": "get_rank",
        "jax.lax.axis_size": "get_world_size",
        "jaxcomm.init": "init_process_group new_group",
        "jaxcomm.finalize": "destroy_process_group",
        "jaxcomm.ring_attention": "context_parallel",
    }.items()
    for other in others.split()
}


def looked_up(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module: it raises, and says the name here.

    >>> jaxcomm.check
    Traceback (most recent call last):
    AttributeError: jaxcomm.check is jaxcomm.raise_if_failed now
    >>> jaxcomm.all_reduce
    Traceback (most recent call last):
    AttributeError: module 'jaxcomm' has no attribute 'all_reduce'. See jaxcomm.psum
    """

    def fail(name: str) -> NoReturn:
        asked = f"{module}.{name}"
        if asked in NAMES:
            raise AttributeError(f"{asked} is {NAMES[asked]} now", name=name)
        here = f". See {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{here}", name=name
        )

    return fail


def keywords(**now: str) -> Callable[[Function], Function]:
    """Let a function say what to pass for keywords of earlier versions."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args, **options):
            for name in options.keys() & now:
                raise TypeError(
                    f"{function.__name__}: {name}= is no argument any more. Pass "
                    f"{now[name]}."
                )
            return function(*args, **options)

        return checked  # pyright: ignore[reportReturnType]

    return decorate


def needed(**said: str) -> Callable[[Function], Function]:
    """Let a function say what to pass for keywords that its namesake elsewhere lacks.

    >>> @needed(sharding="sharding=jax.P(batch, tokens, heads)")
    ... def attend(x, *, sharding): ...
    >>> attend(1)
    Traceback (most recent call last):
    TypeError: attend: sharding= is missing. Pass sharding=jax.P(batch, tokens, heads).
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args, **options):
            for name in said.keys() - options.keys():
                raise TypeError(
                    f"{function.__name__}: {name}= is missing. Pass {said[name]}."
                )
            return function(*args, **options)

        return checked  # pyright: ignore[reportReturnType]

    return decorate
