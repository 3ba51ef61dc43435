"""Kernels of our own for CUDA, by Pallas and Triton, with every mask and option.

A tile's scores stay in a multiprocessor; mask, bias and dropout are those of
``scores.py``. Here is the kernel of the forward pass, too.

Source: Dao, FlashAttention-2, 2023.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxcomm.attention.kernels.kernel import (
    OPTIONS,
    Grads,
    Hop,
    Kernel,
    at_least_half,
)
from jaxcomm.attention.kernels.pallas.gradients import (
    grad_bias,
    grad_keys,
    grad_queries,
)
from jaxcomm.attention.kernels.pallas.work import (
    LOG2_E,
    Sizes,
    Work,
    call_kernel,
    common_specs,
    float32_of,
    operands_of,
    product,
    read,
    row_specs,
    walk,
)
from jaxcomm.compat import gpus

_LN_2 = 1 / LOG2_E

_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST_HEAD_SIZE = 256
# In 16 bits, where a multiprocessor has room for such tiles: in GPUs of these major
# compute capabilities.
_WIDEST_HEAD_SIZE, _WIDE = 512, (9, 10)


@dataclasses.dataclass(frozen=True)
class Pallas(Kernel):
    """Our kernels; they are compiled for the GPUs at hand.

    Attributes:
      sizes: tiles of the output, of the gradient of queries, and of those of keys and
        values. If None, as were the fastest.
      interpret: whether to run on a CPU, slowly.
    """

    sizes: tuple[Sizes, Sizes, Sizes] | None = None
    interpret: bool = False
    name = "pallas"
    options = frozenset(OPTIONS)

    def why_not(self, hop):
        if hop.query.dtype.name not in _DTYPES:
            return (
                f"it computes in {', '.join(_DTYPES)}, and query is {hop.query.dtype}"
            )
        size = max(hop.query.shape[3], hop.value.shape[3])
        is_short = hop.query.dtype.itemsize == 2
        largest = _WIDEST_HEAD_SIZE if is_short else _LARGEST_HEAD_SIZE
        if size > largest:
            return f"the head size is {size}, and it takes {largest} at most"
        if not (hop.query.size and hop.key.size and hop.value.size):
            shapes = f"query {hop.query.shape}, key {hop.key.shape}"
            return f"there is nothing to compute ({shapes})"
        reason = gpus.triton_mismatch()
        if reason is not None or hop.platform is None or self.interpret:
            return reason
        reason = gpus.why_not_compiled(hop)
        if reason is not None:
            return reason
        found = gpus.local()
        reason = gpus.why_none_serves(found)
        if reason is None and size > _LARGEST_HEAD_SIZE:
            reason = _why_not_wide(size, gpus.capabilities(found))
        return reason or gpus.why_no_triton_for(found[0].device_kind)

    def _sizes(self, hop: Hop) -> tuple[Sizes, Sizes, Sizes]:
        return self.sizes or (_forward_sizes(hop), *_backward_sizes(hop))

    def forward(self, hop):
        return _attend(hop, None, self._sizes(hop)[0], self.interpret)

    def forward_onto(self, hop, merged):
        return _attend(hop, merged, self._sizes(hop)[0], self.interpret)

    def backward(self, hop, saved):
        return self.backward_onto(hop, saved, None)

    def backward_onto(self, hop, saved, total):
        _, of_queries, of_keys = self._sizes(hop)
        saved = saved._replace(lse=saved.lse * LOG2_E)
        query, slopes = grad_queries(hop, saved, total, of_queries, self.interpret)
        key, value = grad_keys(hop, saved, of_keys, self.interpret)
        bias = None
        if hop.scores.bias is not None:
            bias = grad_bias(hop, saved, of_keys, self.interpret)
        return Grads(query, key, value, bias, slopes)


def _why_not_wide(size: int, capabilities: set[tuple[int, ...]]) -> str | None:
    small = min((x for x in capabilities if x[0] not in _WIDE), default=None)
    if small is None:
        return None
    return (
        f"the head size is {size}, and on a GPU of compute capability "
        f"{'.'.join(map(str, small))} it takes {_LARGEST_HEAD_SIZE} at most"
    )


def _forward_sizes(hop: Hop) -> Sizes:
    """Return the tiles of the output.

    In bfloat16 and up to a head size of 128, of eight on an H200 the fastest.
    """
    head_size = max(hop.query.shape[3], hop.value.shape[3])
    if hop.query.dtype.itemsize > 2:
        return Sizes(queries=64, keys=32, warps=4, stages=1)
    if head_size > 256:
        # Tiles of 64 keys are 1.2 times as fast, and leave little room for a bias.
        return Sizes(queries=64, keys=32, warps=8, stages=1)
    if head_size > 128:
        return Sizes(queries=128, keys=32, warps=8, stages=2)
    return Sizes(queries=128, keys=64, warps=4, stages=3 if head_size <= 64 else 2)


def _backward_sizes(hop: Hop) -> tuple[Sizes, Sizes]:
    """Return the tiles of the gradients of queries, and of keys and values.

    In bfloat16 and up to a head size of 128, of eight each on an H200 the fastest.
    """
    head_size = max(hop.query.shape[3], hop.value.shape[3])
    if hop.query.dtype.itemsize > 2:
        return Sizes(32, 32, 4, 1), Sizes(32, 32, 4, 1)
    if head_size > 256:
        return Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1)
    if head_size > 128:
        return Sizes(64, 32, 4, 1), Sizes(32, 64, 4, 1)
    of_keys = Sizes(queries=64, keys=64, warps=4, stages=2)
    return (of_keys if head_size > 64 else Sizes(128, 64, 8, 2)), of_keys


def _attend(hop: Hop, merged, sizes: Sizes, interpret: bool):
    """Compute ``Kernel.forward``, or ``Kernel.forward_onto`` if ``merged`` is not None.

    Args:
      hop: in bfloat16, float16 or float32.
      merged: (out, lse) over other keys, or None.
      sizes: of the tiles.
      interpret: whether to run the kernel on a CPU, slowly.
    """
    work = Work(hop, sizes)
    visits, _ = work.visits()
    columns = work.value.shape[3]

    def kernel(visits, queries, keys, *refs):
        slope, seed, bias, query, key, value, merged, out, lse = refs
        rows = read(queries)
        query = query[...]
        slope, seed = read((slope, seed))

        def visit(is_masked):
            def step(turn, carry):
                top, total, summed = carry
                at = pl.ds(visits.order[turn] * sizes.keys, sizes.keys)
                tile = work.tile(
                    *(rows, read(keys, at), slope, seed, read(bias, (..., at))),
                    is_masked=is_masked,
                    across=False,
                )
                scores, _ = work.scores(tile, product(query, key[at, :].T))
                new_top = jnp.maximum(top, scores.max(1))
                finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                weights = jnp.exp2(scores - finite[:, None])
                decay = jnp.exp2(top - finite)
                total = total * decay + weights.sum(1)
                thinned = tile.thin(weights).astype(value.dtype)
                summed = summed * decay[:, None] + product(thinned, value[at, :])
                return new_top, total, summed

            return step

        def attend(top, total, summed):
            top, total, summed = walk(visits, visit, (top, total, summed))
            total = at_least_half(total)
            out[...] = summed / total[:, None]
            lse[...] = (top + jnp.log2(total)) * _LN_2

        if merged is None:
            nothing = jnp.zeros((sizes.queries,), jnp.float32)
            attend(nothing - jnp.inf, nothing, jnp.zeros(out.shape, jnp.float32))
            return

        @pl.when(visits.counts[1] > 0)
        def _():
            summed, top = read(merged)
            # Of rows that saw no key the sum is 0, as their output.
            total = jnp.where(top == -jnp.inf, 0.0, 1.0)
            attend(top * LOG2_E, total, summed)

    rows, whole, of_rows = row_specs(work)
    if merged is not None:
        merged = work.pad_rows(merged[0]), work.pad_of_rows(merged[1])
    given = operands_of(work, visits)
    first = len(jax.tree.leaves(given))
    out, lse = call_kernel(
        kernel,
        name="jaxcomm_attention_forward",
        grid=(work.tiles[0], work.heads, work.batch),
        in_specs=(
            *common_specs(work, visits),
            *(rows(work.query), whole(work.key), whole(work.value)),
            None if merged is None else (rows(merged[0]), of_rows),
        ),
        out_specs=(rows(work.value), of_rows),
        out_shape=(
            float32_of(work.batch, work.query.shape[1], work.heads, columns),
            float32_of(work.batch, work.heads, work.query.shape[1]),
        ),
        # Then a tile that sees nothing need not be written.
        input_output_aliases={} if merged is None else {first: 0, first + 1: 1},
        sizes=sizes,
        interpret=interpret,
    )(*given, merged)
    lse = jnp.moveaxis(lse[:, :, : work.length], 1, 2)
    return work.crop_rows(out, work.value_size), lse


PALLAS = Pallas()
