"""Check what ring_attention was asked for, and say what to do where it cannot."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax.numpy as jnp

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_ADVICE = {
    "bias": "Leave it out, or gather K and V and call jax.nn.dot_product_attention",
    "mask": "Use is_causal, length and key_length, or gather K and V and call "
    "jax.nn.dot_product_attention",
    "query_seq_lengths": "Pad the sequences of the batch to one length and pass length",
    "key_value_seq_lengths": "Pad the sequences of the batch to one length and pass "
    "key_length",
    "local_window_size": "Leave it out, or gather K and V and call "
    "jax.nn.dot_product_attention",
    "dropout_rate": "Leave it out, or apply dropout to the output",
    "sinks": "Leave it out, or merge the sinks by hand from return_residual=True",
    "logits_soft_cap": "Leave it out, or gather K and V and compute attention locally",
    "segment_ids": "Leave it out, or gather K and V and call "
    "jax.nn.dot_product_attention with a mask of equal segments",
}
# What other packages call an argument, by what it is called here or in _ADVICE.
_ELSEWHERE = {
    "axis_name": ("axis", "axis_names", "mesh_axis", "cp_axis", "sp_axis"),
    "bias": ("ab", "attn_bias", "attention_bias", "alibi_slopes"),
    "dropout_rate": ("dropout", "dropout_p", "dropout_rng", "dropout_probability"),
    "implementation": ("impl",),
    "is_causal": ("causal",),
    "key_value_seq_lengths": ("kv_seq_lengths", "kv_seqlen", "cu_seqlens_k"),
    "local_window_size": ("window", "window_size", "sliding_window", "left_window"),
    "logits_soft_cap": ("soft_cap", "softcap", "logit_cap", "attn_logits_soft_cap"),
    "mask": ("attn_mask", "attention_mask", "mask_type"),
    "query_seq_lengths": ("q_seq_lengths", "q_seqlen", "cu_seqlens", "cu_seqlens_q"),
    "return_residual": ("return_lse", "save_residuals", "return_softmax_stats"),
    "scale": ("sm_scale", "softmax_scale", "scaling_factor", "scale_factor"),
    "segment_ids": ("q_segment_ids", "kv_segment_ids", "decoder_segment_ids"),
    "sinks": ("sink", "attention_sinks", "attn_sink", "softmax_offset"),
}
_CALLED_HERE = {
    theirs: ours for ours, all_of in _ELSEWHERE.items() for theirs in all_of
}


def refuses_unknown(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Make a function say what to do where it is given an argument it does not have.

    Its signature stays as it is, for type checkers as well.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unknown(name, list(known)))
        return function(*args, **kwargs)

    return checked


def _unknown(name, known) -> str:
    found = f"ring_attention: it has no argument {name!r}"
    ours = _CALLED_HERE.get(name, name)
    if ours in _ADVICE:
        return f"{found}, and the ring does not support that yet. {_ADVICE[ours]}."
    if ours == name:
        ours = next(iter(difflib.get_close_matches(name, known, 1)), None)
    if ours is None:
        return f"{found}. Leave it out; it takes {', '.join(known)}."
    return f"{found}. Did you mean {ours!r}?"


def refuse_unsupported(**asked) -> None:
    """Raise ValueError for the first argument that is not None.

    >>> refuse_unsupported(bias=None, sinks=None)
    """
    for name, found in asked.items():
        if found is not None:
            raise ValueError(
                f"ring_attention: {name} was given ({type(found).__name__}), and the "
                f"ring does not support it yet. {_ADVICE[name]}."
            )


def check_arrays(query, key, value, is_causal: bool) -> None:
    """Check shapes and dtypes of the local blocks.

    Args:
      query: (B, T, N, D) floating.
      key, value: (B, S, K, D) of the same dtype; K divides N, and S is T if causal.

    Raises:
      TypeError: a dtype is not floating, or dtypes differ.
      ValueError: the shapes do not fit together.
    """
    named = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in named.items())
    for name, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"ring_attention: {name} has dtype {x.dtype}. Pass a floating dtype."
            )
        if x.ndim != 4:
            raise ValueError(
                f"ring_attention: {name} has shape {x.shape}. Pass 4 dimensions: "
                "batch, tokens, heads, head size."
            )
    if not query.shape[3]:
        raise ValueError(
            f"ring_attention: the head size is 0 ({found}). Pass heads of one or more."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"ring_attention: dtypes differ ({found}). Cast them to one dtype."
        )
    if key.shape != value.shape:
        raise ValueError(
            f"ring_attention: key and value differ in shape ({found}). They travel "
            "together: give them one shape."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"ring_attention: batch or head size differ ({found}). Dimensions 0 and 3 "
            "must be equal."
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"ring_attention: {heads} query heads are not a multiple of {key_heads} "
            f"key heads ({found}). Each key head serves an equal group of query heads."
        )
    if is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"ring_attention: is_causal=True with {query.shape[1]} queries and "
            f"{key.shape[1]} keys per rank. Causal attention needs one sequence: give "
            "them equal lengths, or pass is_causal=False."
        )


def check_scale(scale: float | None, head_size: int) -> float:
    """Return the factor on the scores, ``1 / sqrt(head_size)`` by default.

    Raises:
      TypeError: ``scale`` is traced or is not a number.
    """
    if scale is None:
        return head_size**-0.5
    try:
        if isinstance(scale, (str, bytes, bool)):  # of which float() makes a number
            raise TypeError
        return float(scale)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"ring_attention: scale={scale!r} is not a Python number. Pass a float, or "
            "scale=1.0 and multiply query by the traced scale."
        ) from error


def check_lengths(
    length: int | None,
    key_length: int | None,
    query_tokens: int,
    key_tokens: int,
    size: int,
) -> tuple[int, int]:
    """Return how many query and key tokens of the whole sequence are real.

    Args:
      length, key_length: as given to ``ring_attention``.
      query_tokens, key_tokens: tokens of each rank, padding included.
      size: number of ranks.

    Raises:
      TypeError: a length is not an int.
      ValueError: a length is negative or beyond what the ranks hold, or only
        ``length`` is given though query and key differ in length.
    """
    if length is not None and key_length is None:
        if query_tokens != key_tokens:
            raise ValueError(
                f"ring_attention: length={length} was given, but ranks hold "
                f"{query_tokens} queries and {key_tokens} keys. Pass key_length too."
            )
        key_length = length
    lengths = []
    for name, asked, tokens in (
        ("length", length, query_tokens),
        ("key_length", key_length, key_tokens),
    ):
        held = size * tokens
        if asked is None:
            lengths.append(held)
            continue
        if isinstance(asked, bool) or not hasattr(asked, "__index__"):
            raise TypeError(
                f"ring_attention: {name}={asked!r} is not an int. Pass the number of "
                "tokens of the whole sequence, known when tracing."
            )
        try:
            count = asked.__index__()
        except TypeError as error:
            raise TypeError(
                f"ring_attention: {name}={asked!r} is traced. Pass the number of "
                "tokens of the whole sequence as a Python int."
            ) from error
        if not 0 <= count <= held:
            raise ValueError(
                f"ring_attention: {name}={count} tokens, but {size} ranks with "
                f"{tokens} tokens each hold {held}. Pass the length before padding."
            )
        lengths.append(count)
    return lengths[0], lengths[1]
