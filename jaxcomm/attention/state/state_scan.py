"""Recurrent layers over a sequence that is split across devices."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention import arguments
from jaxcomm.attention.kernels.kernel import sum_dtype
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import promotes_ranks
from jaxcomm.attention.on_ranks import vary_alike
from jaxcomm.attention.permutation import poison_both_ways
from jaxcomm.attention.positions import are_right, documents_of, held_tokens
from jaxcomm.attention.state.dealt import DealtFragments, checked_most
from jaxcomm.attention.state.fragments import Fragments
from jaxcomm.attention.state.kernel import StateKernel, StateRows
from jaxcomm.attention.state.maps import StateMap, varying_like
from jaxcomm.attention.strategies.strategy import keep
from jaxcomm.primitives.arguments import flag
from jaxcomm.primitives.call import SCOPE, AxisName, Scope, call_of

Array = jax.Array | np.ndarray

_WHAT = "state_scan"
# The logarithm of a decay that leaves nothing in float32. Sums of gates lose the digits
# of what follows a larger one.
_FORGOTTEN = -60.0


class _Call(NamedTuple):
    """What is known of a call before it sees an array.

    Attributes:
      kernel: what computes the rows.
      axis_name: the axes that split the sequence.
      scope: by which collectives travel, those of the backward pass too.
    """

    kernel: StateKernel
    axis_name: Any
    scope: Scope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(call: _Call, rows: StateRows, fragments):
    """Run over the rows of a rank.

    Args:
      call: what is known before.
      rows: of this rank, as its fragments cut them.
      fragments: of this rank.

    Returns:
      (out, states): rows of outputs, and (F, B, N, K, V), the state behind each
      fragment.
    """
    return _forward(call, rows, fragments)[0]


@promotes_ranks
def _forward(call: _Call, rows: StateRows, fragments):
    maps, kept = call.kernel.summary(rows)
    whole = fragments.whole(maps)
    with SCOPE(call.scope):
        start = fragments.entering(whole, call.axis_name)
    before, ends = fragments.states(maps, start)
    out, _ = call.kernel.run(rows, before, kept)
    saved = keep((out, ends, maps.factor, whole.factor, kept, before))
    return saved[:2], (rows, fragments, *saved[2:])


@promotes_ranks
def _backward(call: _Call, residuals, grads):
    rows, fragments, factor, whole, kept, before = residuals
    grad_out, grad_ends = grads
    mirror = call.kernel.mirror(rows, kept, grad_out)
    maps = StateMap(factor, mirror).mirrored(mirror)
    # The gradient of a fragment's own end enters behind it.
    _, own = fragments.states(maps, grad_ends, is_mirrored=True)
    whole = StateMap(whole, own).mirrored(own)
    with SCOPE(call.scope):
        start = fragments.entering(whole, call.axis_name, is_mirrored=True)
    behind, _ = fragments.states(maps, grad_ends + start, is_mirrored=True)
    found = call.kernel.backward(rows, kept, before, grad_out, behind)
    return found.replace(begins=None), None


_scan.defvjp(_forward, _backward)
# Called outside of jit, each of its operations would be compiled by itself.
_scan_compiled = jax.jit(_scan, static_argnums=0)


@promotes_ranks
def state_scan(
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    axis_name: AxisName,
    tokens: Tokens | Layout,
    *,
    kernel: StateKernel,
    beta: Array | None = None,
    scale: float | None = None,
    return_state: bool = False,
    most_fragments: int = 8,
    lane: str | None = None,
    backend: str | None = None,
) -> Any:
    """Run a recurrent layer over a sequence split across devices.

    For use inside ``jax.shard_map``, beside :func:`ring_attention` and with the same
    tokens. Each token changes the state of its head, (K, V), and reads it with its
    query; see the kernel for how. A document begins with a state of zeros. A document
    is a run of tokens of one segment id. Padding changes no state, and gives 0.

    Each rank says what its fragments of consecutive tokens do to a state, whatever it
    is. One exchange gives each fragment the state before it. Its size does not depend
    on the length of the sequence. States and sums are float32. The gradient takes one
    exchange too. Differentiable as often as you like: gradients of gradients are those
    of these operations.

    Args:
      query: (B, T, H, K) or (T, H, K) floating, the tokens of this rank.
      key: of the same shape and dtype. Delta rules want keys of length 1.
      value: (B, T, N, V) or (T, N, V), same dtype; H divides N.
      gate: (B, T, N) floating, the logarithm of each token's decay; or (B, T, N, K),
        for a kernel with a gate for each channel. Below -60 it counts as -60.
      axis_name: the mesh axis (or tuple of axes) over which the sequence is split.
      tokens: of this rank, as in ``ring_attention``: of the schedule ``"zigzag"``,
        ``"contiguous"`` or another whose fragments are few.
      kernel: ``GatedDelta()``, ``KimiDelta()``, ``Mamba2()`` or a ``StateKernel`` of
        your own.
      beta: (B, T, N) floating, for kernels that take it.
      scale: Python number that multiplies the queries. If None, ``1 / sqrt(K)``.
      return_state: whether to return the state behind the sequence as well.
      most_fragments: of a :func:`document_layout`: how many pieces of cut documents a
        rank may hold, and sends the map of. Each document that is cut gives a rank two.
        If one holds more, results are NaN on all ranks.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      (B, T, N, V) or (T, N, V) in the dtype of ``value``. With ``return_state`` a tuple
      of that and float32 (B, N, K, V) or (N, K, V), equal on all ranks. Float64 inputs
      are summed, and have their state, in float64.

    Raises:
      ValueError: shapes, tokens and axis do not fit together, or the layout deals too
        many fragments, as ``"striped"`` does.
      TypeError: a dtype or the type of an option is another, or positions are missing.
      NameError: ``axis_name`` is not bound; call inside ``jax.shard_map``.

    >>> layout = Layout("zigzag", size=4, length=4096)
    >>> def layer(x, gate, tokens):
    ...     kernel = jaxcomm.attention.state.Mamba2()
    ...     return state_scan(x, x, x, gate, "context", tokens, kernel=kernel)
    >>> split = jax.P(None, "context")
    >>> batch = jnp.ones((1, 4096, 4, 64)), -jnp.ones((1, 4096, 4))
    >>> (x, gate), tokens = layout.reorder(batch)
    >>> layer = jax.jit(jax.shard_map(layer, in_specs=split, out_specs=split))
    >>> layer(x, gate, tokens).shape
    (1, 4096, 4, 64)
    """
    return_state = flag(return_state, f"{_WHAT}: return_state")
    named = call_of(_WHAT, axis_name, lane=lane, backend=backend)
    axis_name = named.axes[0] if len(named.axes) == 1 else named.axes
    arguments.check_axes(named.axes, _WHAT)
    had_batch, arrays = _checked(kernel, query, key, value, gate, beta)
    arguments.check_are_split(_WHAT, named.axes, value=arrays["value"])
    with SCOPE(named.scope):
        tokens, layout = held_tokens(
            tokens, arrays["value"], axis_name, _WHAT, "value", "tokens"
        )
        ids, is_real = documents_of(
            tokens, layout, arrays["value"].shape[:2], axis_name, _WHAT
        )
        if layout.is_static:
            fragments = Fragments.of(layout, kernel.chunk, _WHAT)
        else:
            most = checked_most(most_fragments, _WHAT)
            fragments = DealtFragments.of(
                layout, ids, kernel.chunk, most, axis_name, _WHAT
            )
        is_right = are_right(tokens, layout, axis_name, _WHAT)
        if isinstance(fragments, DealtFragments):
            served = fragments.are_served
            is_right = served if is_right is None else is_right & served
        everything = vary_alike((arrays, ids, is_real, is_right), named)
        arrays, ids, is_real, is_right = everything
        arrays["value"] = poison_both_ways(is_right, arrays["value"])
        rows = _rows(kernel, arrays, ids, is_real, scale, fragments)
        if ids is not None:
            fragments = fragments.with_links(ids, axis_name)
        asked = f"{_WHAT}({kernel!r}, schedule={layout.schedule.name!r})"
        scope = dataclasses.replace(named.scope, part_of=asked)
        call = _Call(kernel, axis_name, scope)
        out, states = _scan_compiled(call, rows, fragments)
        out = fragments.join(out).astype(arrays["value"].dtype)
        if is_real is not None:
            out = jnp.where(is_real[..., None, None], out, 0)
        out = poison_both_ways(is_right, out)
        state = fragments.last(states, axis_name) if return_state else None
    if not had_batch:
        out, state = jax.tree.map(lambda x: x[0], (out, state))
    return (out, state) if return_state else out


def _checked(kernel, query, key, value, gate, beta):
    """Return whether there was a batch, and the arrays with one, by name."""
    if not isinstance(kernel, StateKernel):
        raise TypeError(
            f"{_WHAT}: kernel={kernel!r} is no kernel. Pass GatedDelta(), KimiDelta(), "
            "Mamba2() or a StateKernel of your own, of jaxcomm.attention.state."
        )
    had_batch, arrays = arguments.batched(_WHAT, query, key, value)
    arguments.check_are_local(_WHAT, **arrays)
    if kernel.has_beta != (beta is not None):
        raise TypeError(
            f"{_WHAT}: beta was {'not ' * (beta is None)}given, and the kernel "
            f"{kernel.name} takes {'one' if kernel.has_beta else 'none'}."
        )
    arrays["gate"] = jnp.asarray(gate)
    if beta is not None:
        arrays["beta"] = jnp.asarray(beta)
    found = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in arrays.items())
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{_WHAT}: {name} has dtype {x.dtype}. Pass a floating one."
            )
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"{_WHAT}: dtypes differ ({found}). Cast them to one dtype.")
    heads, key_heads = value.shape[2], key.shape[2]
    if query.shape != key.shape or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"{_WHAT}: shapes differ ({found}). Pass query and key of one shape (B, T, "
            "H, K), and value (B, T, N, V)."
        )
    if not heads or not key_heads or heads % key_heads:
        raise ValueError(
            f"{_WHAT}: {heads} heads of value are not a multiple of {key_heads} of key "
            f"({found}). Each key head serves an equal group of value heads."
        )
    of_token = value.shape[:3]
    for name in ("gate", "beta"):
        if name not in arrays:
            continue
        x = arrays[name] = arrays[name] if had_batch else arrays[name][None]
        of_key = key.shape[-1:] if name == "gate" and kernel.gates == "key" else ()
        if x.shape != (*of_token, *of_key):
            raise ValueError(
                f"{_WHAT}: {name} has shape {x.shape[not had_batch :]}, and the kernel "
                f"{kernel.name} wants {(*of_token, *of_key)[not had_batch :]}, one for "
                f"each {'key channel of each ' * bool(of_key)}head of value ({found})."
            )
    if heads != key_heads:
        for name in ("query", "key"):
            arrays[name] = jnp.repeat(arrays[name], heads // key_heads, axis=2)
    return had_batch, arrays


def _rows(kernel, arrays, ids, is_real, scale, fragments) -> StateRows:
    """Return the arrays of a rank as rows, with zeros for padding."""
    of_sums = sum_dtype(arrays["value"].dtype)
    arrays["gate"] = jnp.maximum(arrays["gate"].astype(of_sums), _FORGOTTEN)
    if "beta" in arrays:
        arrays["beta"] = arrays["beta"].astype(of_sums)
    if is_real is not None:
        for name, x in arrays.items():
            real = is_real.reshape(is_real.shape + (1,) * (x.ndim - 2))
            arrays[name] = jnp.where(real, x, 0)
    if ids is None:
        begins = jnp.zeros(arrays["value"].shape[:2], bool)
        begins = varying_like(begins, arrays["value"])
    else:
        begins = fragments.begins(ids)
    cut = {name: fragments.cut(x) for name, x in arrays.items()}
    size = arrays["key"].shape[-1]
    scale = size**-0.5 if scale is None else arguments.number(scale, f"{_WHAT}: scale")
    return StateRows(
        cut["query"], cut["key"], cut["value"], cut["gate"], cut.get("beta"),
        fragments.cut(begins), scale,
    )  # fmt: skip
