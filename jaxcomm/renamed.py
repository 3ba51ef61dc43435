"""What names of earlier versions are called now, for those who still write them."""

import functools
import inspect
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


def explained(**said: str) -> Callable[[Function], Function]:
    """Let a function or class say what to pass where arguments do not fit it.

    Args:
      said: what to pass, by the name of an argument that is needed, or that is none: of
        earlier versions, or of what has the same name elsewhere.

    >>> @explained(sharding="sharding=jax.P(batch, tokens, heads)")
    ... def attend(x, *, sharding, scale=1): ...
    >>> attend(1)
    Traceback (most recent call last):
    TypeError: attend: sharding= is missing. Pass sharding=jax.P(batch, tokens, heads).
    >>> attend(1, 2)
    Traceback (most recent call last):
    TypeError: attend: too many positional arguments. Pass some of x, sharding=, scale=.
    """

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args, **options):
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                wrong, of = _wrong(signature, args, options, str(error))
                right = said.get(of) or f"some of {_taken(signature)}"
                raise TypeError(f"{name}: {wrong}. Pass {right}.") from None
            return function(*args, **options)

        return checked

    return decorate


def _wrong(signature, args, options, error: str) -> tuple[str, str]:
    """Return in words what does not fit a signature, and of which argument."""
    for name in options:
        if name not in signature.parameters:
            return f"{name}= is no argument", name
    try:
        given = signature.bind_partial(*args, **options).arguments
    except TypeError:
        return error, ""
    needed = (n for n, p in signature.parameters.items() if p.default is p.empty)
    name = next(name for name in needed if name not in given)
    return f"{name}= is missing", name


def _taken(signature) -> str:
    """Return in words which arguments there are."""
    names = (
        name + "=" * (parameter.kind == parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "self"
    )
    return ", ".join(names)
