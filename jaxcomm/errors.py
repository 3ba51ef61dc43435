"""The exceptions of this package that are not plain ValueError or TypeError."""


class OutOfRangeError(ValueError, IndexError):
    """An index or a dimension that does not exist; jax.lax raises either type."""


class CommunicatorError(RuntimeError):
    """A communicator is missing, closed, of another mesh, or cannot be made.

    The text names the call that puts it right. While a program runs, XLA raises with
    the same text: ``jax.errors.JaxRuntimeError``, or ``ValueError`` if JAX meets the
    error while it converts an array, as it may with one device per process.
    """
