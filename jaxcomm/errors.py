"""The exceptions of this package that are not plain ValueError or TypeError."""


class CommunicatorError(RuntimeError):
    """A communicator is missing, closed, of another mesh, or cannot be made.

    The text says which call puts it right. Errors met while a program runs come
    from XLA as ``jax.errors.JaxRuntimeError`` instead, with the same text.
    """
