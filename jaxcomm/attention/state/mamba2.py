"""State-space layers whose state decays and adds: no token erases."""

import dataclasses

from jaxcomm.attention.state.chunked import Chunk, ChunkedKernel, sums
from jaxcomm.attention.state.decay import Decays, scores


@dataclasses.dataclass(frozen=True)
class Mamba2(ChunkedKernel):
    """Mamba 2 (SSD): ``S = exp(gate) S + key value^T``, with a gate for each head.

    In the words of Mamba 2: query is C, key is B, value is ``x * dt``, and gate is ``A
    * dt``. Pass ``scale=1.0``.

    Source: Dao and Gu, Transformers are SSMs, 2024.

    Attributes:
      chunk: tokens of a step, a power of two.
    """

    name = "mamba2"
    state = "diagonal"
    chunk: int = 64

    def _chunk_of(self, rows, kept):
        decays = Decays.of(rows.gate, rows.begins)
        query, key, value = sums(rows)
        (seen,) = scores([query], key, decays, rows.key.dtype)
        start, end = decays.from_start[..., None], decays.to_end[..., None]
        return Chunk(
            query=rows.scale * start * query,
            scores=rows.scale * seen,
            erased=None,
            written=value,
            key=end * key,
            decay=decays.through,
        ), None
