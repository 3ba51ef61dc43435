"""What a run of the demo was asked for."""

import dataclasses
import pathlib


class DemoError(Exception):
    """Something the user can mend; its message is all that is shown."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of a run, checked. ``python -m language_model --help`` describes them.

    Attributes:
      data: devices that share the batch.
      microbatches: sequences of a step whose gradients are added in one order, on any
        number of devices. If None, one on each, and in any order.
      context: devices that share a sequence: the size of the ring.
      text: file or folder. If None, the source files of the standard library.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, the platform's own.
      window: tokens that each second layer sees.
      dtype: ``"float32"`` or ``"bfloat16"``, that the layers compute in. Parameters
        and losses are float32.
      check: whether to compare with the reference. If None, when dense attention of the
        sequence fits into memory.
      elastic: whether to go on with a smaller ``data`` after a process has ended.
    """

    data: int = 2
    context: int = 4
    sequence: int = 2048
    steps: int = 36
    text: pathlib.Path | None = None
    backend: str | None = None
    schedule: str = "zigzag"
    seed: int = 0
    output: pathlib.Path = pathlib.Path("demo_output")
    resume: bool = False
    layers: int = 2
    width: int = 256
    window: int = 512
    dtype: str = "float32"
    learning_rate: float = 3e-3
    checkpoint_every: int = 12
    check: bool | None = None
    elastic: bool = False
    microbatches: int | None = None

    @property
    def rows(self) -> int:
        """The sequences of a step."""
        return self.microbatches or self.data

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.sequence

    @property
    def checkpoint_folder(self) -> pathlib.Path:
        return self.output / "checkpoints"

    @property
    def loss_curve(self) -> pathlib.Path:
        return self.output / "loss.png"


def split_devices(
    devices: int | None, data: int | None, context: int | None, *, default: int = 8
) -> tuple[int, int]:
    """Choose the mesh: how many devices share the batch, how many a sequence.

    Args:
      devices: in total. If None, what data and context multiply to, or the default.
      data: devices that share the batch. If None, whatever context leaves.
      context: devices in a ring. If None, the largest number up to 4 that divides, or
        all devices if only 1 does.
      default: devices that there are.

    Returns:
      (data, context), whose product is the number of devices.

    Raises:
      DemoError: the numbers do not multiply.

    >>> split_devices(6, None, None)
    (2, 3)
    """
    asked = {"devices": devices, "data": data, "context": context}
    if devices is None:
        devices = data * context if data and context else default
    if context is None and data is not None:
        context = devices // data
    if context is None:
        context = max(size for size in (4, 3, 2, 1) if devices % size == 0)
        if context == 1:
            context = devices
    if data is None:
        data = devices // context
    if data * context != devices or not devices:
        raise DemoError(
            " and ".join(f"--{name}={n}" for name, n in asked.items() if n is not None)
            + f": {devices} devices are not --data times --context; leave one of the "
            "three out, or make them multiply"
        )
    return data, context


def check_microbatches(microbatches: int | None, data: int) -> None:
    """Raise DemoError if bits would depend on the number of devices."""
    if microbatches is None:
        return
    of_one, left = divmod(microbatches, data)
    if left or (data > 1 and of_one & (of_one - 1)):
        raise DemoError(
            f"--microbatches={microbatches} on --data={data} devices: each must have "
            f"as many, and a power of two of them. Choose {data} times 1, 2, 4 ..."
        )
