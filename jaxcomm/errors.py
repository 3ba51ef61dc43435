"""The exceptions of this package that are not plain ValueError or TypeError."""


class OutOfRangeError(ValueError, IndexError):
    """An index or a dimension that does not exist; jax.lax raises either type."""


class CommunicatorError(RuntimeError):
    """A communicator is missing, closed, of another mesh, or cannot be made.

    The text says which call puts it right. Errors met while a program runs come
    from XLA instead, with the same text: as ``jax.errors.JaxRuntimeError``, or as
    ``ValueError`` where JAX meets them while it converts an array, as it may with one
    device per process.
    """
