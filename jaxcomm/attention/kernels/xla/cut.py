"""Cut a sequence into tiles of equal size that do not straddle its segments."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Cut:
    """Equal tiles over consecutive segments, each segment padded at its end.

    Attributes:
      segments: tokens of each segment, all positive.
      size: tokens of a tile.
    """

    segments: tuple[int, ...]
    size: int

    @classmethod
    def fit(cls, segments: tuple[int, ...], largest: int) -> "Cut":
        """Choose the tile that covers the longest segment with the least padding.

        >>> Cut.fit((1000, 999), 512)
        Cut(segments=(1000, 999), size=500)
        """
        segments = tuple(segment for segment in segments if segment)
        longest = max(segments, default=1)
        return cls(segments, -(-longest // -(-longest // largest)))

    @property
    def count(self) -> int:
        return sum(-(-segment // self.size) for segment in self.segments)

    def split(self, x, axis: int, fill: float | str = 0):
        """Replace dimension ``axis`` by two: which tile, and which token of the tile.

        Args:
          x: array with ``sum(segments)`` tokens in dimension ``axis``.
          axis: the dimension that counts tokens, not negative.
          fill: value of the padding, or ``"edge"`` to repeat each segment's last token.

        Returns:
          Array whose dimensions ``axis`` and ``axis + 1`` are ``(count, size)``.
        """
        parts, start = [], 0
        for segment in self.segments:
            part = x[(slice(None),) * axis + (slice(start, start + segment),)]
            start += segment
            padding = [(0, 0)] * x.ndim
            padding[axis] = (0, -segment % self.size)
            if fill == "edge":
                parts.append(jnp.pad(part, padding, mode="edge"))
            else:
                parts.append(jnp.pad(part, padding, constant_values=fill))
        whole = jnp.concatenate(parts, axis) if parts else x
        shape = (*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :])
        return whole.reshape(shape)

    def join(self, x, axis: int):
        """Undo :meth:`split`: merge dimensions ``axis, axis + 1``, dropping padding."""
        tokens = self.count * self.size
        whole = x.reshape(*x.shape[:axis], tokens, *x.shape[axis + 2 :])
        if tokens == sum(self.segments):
            return whole
        parts, start = [], 0
        for segment in self.segments:
            part = (slice(None),) * axis + (slice(start, start + segment),)
            parts.append(whole[part])
            start += segment + -segment % self.size
        return jnp.concatenate(parts, axis)
