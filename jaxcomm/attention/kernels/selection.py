"""Which kernel computes a hop: the first of a list that can; and which did."""

import functools
import logging
import re
import warnings
from typing import Any

import jax

from jaxcomm.attention.kernels.cudnn import CUDNN
from jaxcomm.attention.kernels.flash import library
from jaxcomm.attention.kernels.flash.kernel import FLASH
from jaxcomm.attention.kernels.kernel import OPTIONS, Hop, Kernel
from jaxcomm.attention.kernels.pallas.kernel import PALLAS
from jaxcomm.attention.kernels.xla.kernel import XLA
from jaxcomm.attention.pairs import Block
from jaxcomm.compat import gpus

_logger = logging.getLogger("jaxcomm.attention")
# In the order of choice. The last computes everything.
KERNELS: tuple[Kernel, ...] = (FLASH, CUDNN, PALLAS, XLA)
# Operations of a hop are named after it and the kernel: see `kernels_of`.
SCOPE = "jaxcomm.attention."


class Refused(ValueError):
    """No kernel that was asked for may compute what a strategy has it compute."""


def kernels_for(implementation: Any, what: str = "ring_attention"):
    """Return the kernels to choose from, in their order.

    Args:
      implementation: a name, a kernel, or None for :data:`KERNELS`.
    """
    if implementation is None:
        return KERNELS
    asked = f"{what}: implementation={implementation!r}"
    names = ", ".join(repr(kernel.name) for kernel in KERNELS)
    ours = f"{names}, a jaxcomm.attention.kernels.Kernel, or None for the fastest"
    if isinstance(implementation, str):
        found = tuple(each for each in KERNELS if each.name == implementation)
        if not found:
            raise ValueError(f"{asked} is not known. Pass {ours}.")
        return found
    if not isinstance(implementation, Kernel):
        needed = ("name", "why_not", "forward", "backward")
        missing = [name for name in needed if not hasattr(implementation, name)]
        reason = "is no kernel"
        if isinstance(implementation, type):
            reason = "is a class, and a kernel is an instance of one"
        elif missing:
            reason = f"is no kernel: it lacks {', '.join(missing)}"
        raise TypeError(f"{asked} {reason}. Pass {ours}.")
    _check_kernel(implementation, asked)
    return (implementation,)


def _check_kernel(kernel: Kernel, asked: str) -> None:
    try:
        hash(kernel)
    except TypeError as error:
        raise TypeError(
            f"{asked} has no hash: {error}. Programs are compiled for a kernel: make "
            f"{type(kernel).__name__} a frozen dataclass of Python values."
        ) from error
    name = getattr(kernel, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"{asked} has name={name!r}. Give {type(kernel).__name__} a name that is "
            "an identifier."
        )
    if any(name == each.name and type(kernel) is not type(each) for each in KERNELS):
        raise ValueError(
            f"{asked} has the name of a kernel of jaxcomm. Give "
            f"{type(kernel).__name__} another name."
        )
    unknown = set(kernel.options) - set(OPTIONS)
    if unknown:
        raise ValueError(
            f"{asked} has options {sorted(unknown)}. Name some of {list(OPTIONS)}."
        )


def narrowed(hop: Hop, blocks: tuple[Block, ...] | str) -> Hop:
    """Return a hop with those of its kernels that may compute it, when traced.

    Args:
      hop: its arrays need only shapes and dtypes. It has the runs that are known.
      blocks: what is seen is one of these; or, in words, why no blocks are known.
    """
    why_no_blocks = str(blocks)
    hop = hop.with_pairs(blocks=() if isinstance(blocks, str) else blocks)
    reasons = {each: _why_not(each, hop, why_no_blocks) for each in hop.kernels}
    kernels = [each for each, why in reasons.items() if why is None]
    refused = [(each.name, why) for each, why in reasons.items() if why is not None]
    if not kernels:
        raise _refusal(refused)
    has_blocks = True in [kernel.by_blocks for kernel in kernels]
    has_runs = True in [kernel.by_runs for kernel in kernels]
    pairs = hop.pairs
    return hop.replace(kernels=tuple(kernels), refused=tuple(refused)).with_pairs(
        blocks=pairs.blocks if has_blocks else (),
        runs=pairs.runs if has_runs else (),
    )


def is_flash(hop: Hop) -> bool:
    """Say whether FlashAttention computes a hop on the GPUs at hand.

    A program may be lowered for others, where another kernel does.
    """
    return _at_hand(hop) == FLASH


def rounds(hop: Hop) -> bool:
    """Say whether a kernel that rounds its results computes a hop on these GPUs."""
    kernel = _at_hand(hop)
    return kernel is not None and kernel.rounds


def _at_hand(hop: Hop) -> Kernel | None:
    """Return what computes a hop on the GPUs at hand; None if the mesh has none."""
    if not gpus.are_of_mesh():
        return None
    hop = hop.replace(platform="cuda")
    return next((x for x in hop.kernels if _why_not(x, hop, "unknown") is None), None)


def unpacked(hop: Hop) -> Hop:
    """Return a hop for the kernels that take all documents, in any order."""
    kernels = tuple(kernel for kernel in hop.kernels if not kernel.by_runs)
    others = tuple(kernel for kernel in KERNELS if not kernel.by_runs)
    return hop.replace(kernels=kernels or others).with_pairs(runs=())


def select(hop: Hop) -> Kernel:
    """Return the kernel of a hop that is being lowered for ``hop.platform``.

    Warns where XLA's tiles are what is left on a GPU, and once of a faster kernel that
    is not installed. Else it logs once why none before it was chosen.
    """
    refused = list(hop.refused)
    for kernel in hop.kernels:
        reason = _why_not(kernel, hop, "its blocks are not known")
        if reason is None:
            if dict(refused).get(FLASH.name, "") == library.missing():
                _tell_of_flash(library.install_line())
            if refused and hop.platform == "cuda" and gpus.local():
                say = _warn_of_tiles if kernel == XLA else _log_choice
                say(kernel.name, " ".join(f"Not {n!r}: {why}." for n, why in refused))
            return kernel
        refused.append((kernel.name, reason))
    raise _refusal(refused)


def may_round(hop: Hop) -> bool:
    """Say whether a kernel that rounds its output may compute a hop.

    It goes by the options alone, and by whether there is a GPU.
    """
    return gpus.are_of_mesh() and any(
        kernel.rounds and _option_lacking(kernel, hop) is None for kernel in hop.kernels
    )


def _option_lacking(kernel: Kernel, hop: Hop) -> str | None:
    """Return the first option of a hop that a kernel does not honour."""
    queries, keys = hop.pairs.queries, hop.pairs.keys
    given = {
        "segment_ids": queries.segment_ids,
        "ranges": queries.range if keys.range is None else keys.range,
        "bias": hop.scores.bias,
        "alibi_slopes": hop.scores.slopes,
        "dropout": hop.scores.seeds,
        "logits_soft_cap": hop.scores.soft_cap,
    }
    for option, value in given.items():
        if value is not None and option not in kernel.options:
            return option
    return None


def _why_not(kernel: Kernel, hop: Hop, why_no_blocks: str) -> str | None:
    lacking = _option_lacking(kernel, hop)
    if lacking is not None:
        return f"it is used without {OPTIONS[lacking]}"
    reason = kernel.why_not(hop)
    if not (reason is None or (isinstance(reason, str) and reason)):
        raise TypeError(
            f"{type(kernel).__name__}.why_not returned {reason!r}. Give the reason in "
            "words, or None if the kernel can compute the hop."
        )
    is_by_runs = kernel.by_runs and bool(hop.pairs.runs)
    if reason is None and kernel.by_blocks and not is_by_runs:
        if not hop.pairs.blocks:
            return why_no_blocks
        if hop.pairs.differs_by_row:
            return "the sequences of the batch differ in their positions"
    return reason


def _refusal(refused) -> Refused:
    ((name, reason),) = refused
    return Refused(
        f"ring_attention: implementation={name!r} was asked for, but {reason}. Pass "
        "implementation=None for what can be had."
    )


@functools.cache
def _tell_of_flash(install_line: str) -> None:
    warnings.warn(
        "ring_attention: FlashAttention-3 would serve this GPU, in less time: "
        f"{install_line}. Or pass implementation='cudnn'.",
        UserWarning,
        stacklevel=2,
    )


@functools.cache
def _log_choice(name: str, reasons: str) -> None:
    _logger.info("ring_attention: %r computes this. %s", name, reasons)


@functools.cache
def _warn_of_tiles(name: str, reasons: str) -> None:
    warnings.warn(
        "ring_attention: XLA computes this tile by tile, many times slower than a "
        f"kernel. {reasons} Pass implementation={name!r} if that is meant.",
        RuntimeWarning,
        stacklevel=2,
    )


# A part of an operation's name, not of the name of a file.
_KERNEL = re.compile(rf"[/\"(]{re.escape(SCOPE)}(\w+)(?=[/\")])")


def kernels_of(program: Any) -> frozenset[str]:
    """Say what computes the attention of a program: the names of its kernels.

    They are those that ``implementation=`` takes: ``"flash"``, ``"cudnn"``,
    ``"pallas"`` and ``"xla"``, or the ``name`` of a :class:`Kernel`. A program may have
    several: another for some hops, or under ``vmap``.

    Args:
      program: what ``jax.jit(f).lower(...)`` returns, or its ``.compile()``, or a text
        of either that has the names of operations.

    Returns:
      Empty if the program has no attention of jaxcomm.

    Raises:
      TypeError: it is no program.

    Example:
      >>> @jax.jit
      ... def attend(x):
      ...     return jaxcomm.dot_product_attention(
      ...         x, x, x, sharding=jax.P("data", "context"))
      >>> kernels_of(attend.lower(jnp.ones((2, 16, 2, 8))))
      frozenset({'xla'})
    """
    if isinstance(program, str):
        text = program
    elif isinstance(program, jax.stages.Lowered):
        text = program.as_text(debug_info=True)
    elif isinstance(program, jax.stages.Compiled):
        text = program.as_text() or ""
    else:
        raise TypeError(
            f"kernels_of: expected a lowered or compiled program, got "
            f"{type(program).__name__}. Pass jax.jit(f).lower(...)."
        )
    return frozenset(_KERNEL.findall(text))
