"""FlashAttention-3, for GPUs of compute capability 9.0.

Source: Shah et al., FlashAttention-3, 2024.
"""

import dataclasses
import functools
import os

import jax.numpy as jnp

from jaxcomm.attention.kernels.blocks import COLUMNS, BlockKernel, with_delta
from jaxcomm.attention.kernels.cudnn import CUDNN
from jaxcomm.attention.kernels.flash import library, sequences
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved
from jaxcomm.attention.pairs import Block, Run
from jaxcomm.compat import gpus

_CAPABILITY = (9, 0)
# Its gradients of queries are summed in the order in which blocks end.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class Flash(BlockKernel):
    """FlashAttention-3's kernels. They round the output to the query's dtype."""

    name = "flash"
    options = frozenset({"segment_ids"})
    by_runs = True

    def why_not(self, hop):
        reason = _why_not(hop)
        if reason is not None or hop.platform is None:
            return reason
        reason = gpus.why_not_compiled(hop)
        found = gpus.local() if reason is None else []
        # By name it is used without a GPU to ask: the program may be for another one.
        if reason is not None or (hop.kernels == (self,) and not found):
            return reason
        reason = why_not_on(found)
        if reason is not None or hop.kernels == (self,):
            return reason
        pads = hop.query.shape[3] != hop.value.shape[3]
        if pads and _is_block(hop) and CUDNN.why_not(hop) is None:
            return "cuDNN computes values of another head size without padding them"
        return None

    def forward(self, hop):
        size, hop = hop.value.shape[3], _of_one_size(_chosen(hop))
        out, lse = super().forward(hop) if _is_block(hop) else _attend_in_runs(hop)
        return _cut(out, size), lse

    def backward(self, hop, saved):
        given, hop = (hop.query, hop.key, hop.value), _of_one_size(_chosen(hop))
        size = hop.query.shape[3]
        saved = saved._replace(
            grad_out=_grown(saved.grad_out, size), out=_grown(saved.out, size)
        )
        compute = super().backward if _is_block(hop) else _gradients_of_runs
        grads = compute(hop, saved)
        return Grads(*(_cut(x, y.shape[3]) for x, y in zip(grads, given, strict=False)))

    def attend(self, hop, block, query, key, value):
        return library.forward(query, key, value, **_options(hop, block))

    def gradients(self, hop, block, arrays, out, lse, grad_out):
        query, key, value = arrays
        return library.backward(
            query, key, value, lse, out, grad_out, **_options(hop, block)
        )


def why_not_on(found: list) -> str | None:
    """Say why it does not serve these GPUs, or None."""
    reason = gpus.why_none_serves(found)
    if reason is None and gpus.capabilities(found) != {_CAPABILITY}:
        return "it is made for GPUs of compute capability 9.0 alone"
    return reason or library.why_not()


def _of_one_size(hop: Hop) -> Hop:
    """Return a hop whose keys and values have heads of one size, padded with 0."""
    size = _size(hop)
    arrays = {name: getattr(hop, name) for name in ("query", "key", "value")}
    return hop.replace(**{name: _grown(x, size) for name, x in arrays.items()})


def _size(hop: Hop) -> int:
    return max(hop.query.shape[3], hop.value.shape[3])


def _grown(x, size: int):
    grows = size > x.shape[3]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])]) if grows else x


def _cut(x, size: int):
    return x[..., :size] if size < x.shape[3] else x


def _is_block(hop: Hop) -> bool:
    """Whether a hop is a block; else its runs are computed."""
    pairs = hop.pairs
    is_plain = pairs.queries.segment_ids is None and not pairs.differs_by_row
    return bool(pairs.blocks) and is_plain


def _chosen(hop: Hop) -> Hop:
    """Return a hop of one of several blocks as a run: which is where sequences begin.

    Where the blocks are hidden in other ways a branch has to choose. Of a block that
    stays one it is the part that is not hidden.
    """
    if not _is_block(hop):
        return hop
    blocks = hop.pairs.blocks
    trimmed = hop.with_pairs(blocks=tuple(map(_trimmed, blocks)))
    if len(blocks) == 1:
        return trimmed
    bounds = {(each.left, each.right) for each in blocks if not each.is_empty}
    are_squares = all(x.is_empty or x.shape[0] == x.shape[1] for x in blocks)
    if bounds == {(None, 0)} and are_squares:
        are = "same"
    elif bounds == {(None, None)}:
        are = "apart"
    else:
        return trimmed
    run = Run((0, hop.query.shape[1]), (0, hop.key.shape[1]), are, False)
    run = dataclasses.replace(run, starts=sequences.of_blocks(hop, run))
    return hop.with_pairs(blocks=(), block=None, runs=(run,))


def _options(hop: Hop, block: Block) -> dict:
    """Return what the kernel is told of a block."""
    rows, columns = block.shape
    # The kernel counts from the key that is as far from the last as the query is.
    offset = columns - rows
    left = -1 if block.left is None else block.left + offset
    right = -1 if block.right is None else block.right - offset
    is_causal = right == 0
    # A bound that nothing is beyond is none.
    left = -1 if left >= columns - 1 else left
    right = -1 if right >= rows - 1 else right
    window = left, 0 if is_causal else right
    return {"scale": hop.scores.scale, "is_causal": is_causal, "window": window}


def _trimmed(block: Block) -> Block:
    """Return the rectangle from the first to the last query and key that meet.

    >>> _trimmed(Block((0, 4), (0, 8), left=None, right=2))
    Block(queries=(0, 4), keys=(0, 6), left=None, right=2)
    """
    rows, columns = block.shape
    first, end = 0, rows
    if block.right is not None:
        first = min(max(first, -block.right), rows)
    if block.left is not None:
        end = max(min(end, columns + block.left), first)
    key, key_end = 0, columns
    if block.left is not None:
        key = min(max(key, first - block.left), columns)
    if block.right is not None:
        key_end = max(min(key_end, end + block.right), key)
    shift = first - key
    left, right = block.left, block.right
    return Block(
        (block.queries[0] + first, block.queries[0] + end),
        (block.keys[0] + key, block.keys[0] + key_end),
        None if left is None else left - shift,
        None if right is None else right + shift,
    )


def _why_not(hop: Hop) -> str | None:
    """Say why it cannot compute a hop whatever the machine, or None if it can."""
    query, has_columns = hop.query, hop.is_backward and hop.has_residual
    reason = gpus.why_not_arrays(hop, _size(hop) + has_columns * COLUMNS)
    if reason is not None:
        return reason
    if hop.pairs.queries.segment_ids is not None:
        if not hop.pairs.runs:
            return (
                "it takes documents where a rank's keys are its own, or all in their "
                "natural order"
            )
        if hop.platform is not None and not hop.pairs.is_packed:
            return "nothing says where the documents begin"
    if hop.is_backward and _DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
        return f"its gradients are not deterministic, which {_DETERMINISTIC} asks for"
    if hop.scores.scale <= 0:
        return f"it takes a positive scale, and this is {hop.scores.scale}"
    # Its numbers of elements have 32 bits.
    numbers = query.shape[1] * query.shape[2] * gpus.LARGEST_HEAD_SIZE
    if query.shape[0] > 1 and numbers >= 2**31:
        return f"a query of shape {query.shape} is too large for it in a batch"
    if _is_block(hop):
        return None
    return _why_not_runs(hop) if hop.pairs.runs else None


# Runs of queries: one call of the packed kernel each, for all their documents.


def _why_not_runs(hop: Hop) -> str | None:
    """Say why the runs of a hop cannot be computed as packed sequences, or None."""
    mask, runs = hop.pairs.mask, hop.pairs.runs
    by_places = any(run.are in ("among", "behind") for run in runs)
    if by_places and hop.pairs.differs_by_row:
        return "the sequences of the batch differ in their positions"
    if mask.right not in (0, None) or (mask.right is None and mask.left is not None):
        return "in packed sequences a window ends at the query's own token"
    if any(run.are == "behind" for run in runs):
        return None
    if mask.left is not None and not all(run.is_consecutive for run in runs):
        return "a window is counted in tokens, and a rank's tokens jump"
    return None


def _attend_in_runs(hop: Hop):
    """Attend in the runs of a hop: (out, lse)."""
    found = [_attend_in_run(*of) for of in _runs(hop)]
    out, lse = (jnp.concatenate(each, 1) for each in zip(*found, strict=True))
    return out, lse


def _gradients_of_runs(hop: Hop, saved: Saved) -> Grads:
    """Return the gradients of the runs of a hop."""
    of_keys = hop.query.dtype if len(hop.pairs.runs) == 1 else hop.sum_dtype
    found = (_gradients_of_run(*of, saved) for of in _runs(hop))
    queries, *keys = zip(*found, strict=True)
    sums = (
        functools.reduce(jnp.add, [x.astype(of_keys) for x in each]) for each in keys
    )
    return Grads(jnp.concatenate(queries, 1), *sums)


def _runs(hop: Hop):
    """Return the hop with each of its runs, and where its sequences begin."""
    return [
        (hop, run, sequences.of_run(hop, run) if run.starts is None else run.starts)
        for run in hop.pairs.runs
    ]


def _options_of_run(hop: Hop, run: Run) -> dict:
    left, right = hop.pairs.mask.left, hop.pairs.mask.right
    window = -1 if left is None else left, -1 if right is None else right
    if run.are == "apart":  # What is seen of another rank's keys is all of a sequence.
        window = -1, -1
    if run.are == "behind":
        # The last query is as far from the last key as the queries are many.
        window = (left or 0) - (run.queries[1] - run.queries[0]), -1
    longest = run.longest
    if longest is None:
        longest = run.queries[1] - run.queries[0], run.keys[1] - run.keys[0]
    options = {"scale": hop.scores.scale, "is_causal": window[1] == 0, "window": window}
    return options | {"longest": longest}


def _packed(x, part: tuple[int, int]):
    """(B, T, ...) to (B * tokens, ...), of a part of the tokens."""
    return x[:, slice(*part)].reshape(-1, *x.shape[2:])


def _seen(hop: Hop, run: Run, lse, otherwise: float):
    """Return the log-sum-exp of (B, queries, N), of rows that see nothing another."""
    ids = hop.pairs.queries.segment_ids
    if run.are != "behind" or ids is None:
        return lse
    ids = ids[:, slice(*run.queries)]
    is_seen = (ids == ids[:, :1]) & (ids >= 0)
    return jnp.where(is_seen[..., None], lse, otherwise)


def _attend_in_run(hop: Hop, run: Run, starts):
    """Return (out, lse) of a run: (B, queries, N, V) and (B, queries, N)."""
    query = _packed(hop.query, run.queries)
    key, value = (_packed(x, run.keys) for x in (hop.key, hop.value))
    out, lse = library.forward(query, key, value, starts, **_options_of_run(hop, run))
    shape = hop.query.shape[0], run.queries[1] - run.queries[0]
    lse = _seen(hop, run, lse.T.reshape(*shape, -1), -jnp.inf)
    return out.reshape(*shape, *out.shape[1:]), lse


def _gradients_of_run(hop: Hop, run: Run, starts, saved: Saved):
    """Return those of a run's queries, and of all keys and values of its hop."""
    grad_out, out, lse, delta = saved
    given = hop.query, hop.key, hop.value
    query, key, value = given
    if hop.has_residual:
        query, key, value, out, grad_out = with_delta(*given, out, grad_out, delta)
    key, value = (_packed(x, run.keys) for x in (key, value))
    query, out, grad_out = (_packed(x, run.queries) for x in (query, out, grad_out))
    lse = _seen(hop, run, lse[:, slice(*run.queries)], jnp.inf)
    lse = lse.reshape(-1, lse.shape[2]).T
    grads = library.backward(
        query, key, value, lse, out, grad_out, starts, **_options_of_run(hop, run)
    )  # fmt: skip
    parts = run.queries, run.keys, run.keys
    query, *keys = (
        x.reshape(whole.shape[0], part[1] - part[0], *x.shape[1:])[
            ..., : whole.shape[3]
        ]
        for x, part, whole in zip(grads, parts, given, strict=True)
    )
    padding = [(0, 0)] * 4
    padding[1] = run.keys[0], hop.key.shape[1] - run.keys[1]
    return (query, *(jnp.pad(x, padding) for x in keys))


FLASH = Flash()
