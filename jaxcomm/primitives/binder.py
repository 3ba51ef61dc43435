"""Binds primitives in place of a call that is being lowered."""


class Binder:
    """Binds primitives over the axes, and in the lane, of the call being lowered."""

    def __init__(self, axes, index_groups, lane, backend, name):
        """Keeps what the call was bound with."""
        self.axes = axes
        self.index_groups = index_groups
        self._common = {"lane": lane, "backend": backend, "name": name}

    def __call__(self, primitive, xs, *, index_groups="same", **own):
        """Applies a primitive to arrays of this rank."""
        if index_groups == "same":
            index_groups = self.index_groups
        return primitive.bind(
            *xs, axes=self.axes, index_groups=index_groups, invariant=False,
            **self._common, **own,
        )  # fmt: skip
