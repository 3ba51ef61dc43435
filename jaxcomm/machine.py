"""What devices and their links do: one value for all that depends on a machine."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a device and its links do.

    A domain is the devices that fast links join, as NVLink does. A host is the devices
    of one operating system. Devices are numbered host by host.

    Attributes:
      flops: FLOP/s of attention, of one device. This and the next two compare the
        strategies of attention.
      bytes_per_second: of one device, one way, within a domain.
      latency: seconds of a send within a domain.
      source: where the numbers are from.
      platform: of the devices, as JAX names it.
      domain: devices of a domain.
      host: devices of a host.
      memory: bytes of one device; 0 if unknown.
      step: seconds that a step of attention takes beside its products and sends. Its
        kernels are small, and have to be started.

    Example:
      >>> machine = jaxcomm.Machine.named("h200")
      >>> machine.domain, machine.bytes_per_second
      (8, 350000000000.0)
      >>> dataclasses.replace(machine, domain=4).domain
      4
    """

    flops: float
    bytes_per_second: float
    latency: float
    source: str
    platform: str = "gpu"
    domain: int = 8
    host: int = 8
    memory: float = 0
    step: float = 0

    def __post_init__(self) -> None:
        for name in ("flops", "bytes_per_second"):
            _check(name, getattr(self, name), is_zero_fine=False)
        for name in ("latency", "memory", "step"):
            _check(name, getattr(self, name), is_zero_fine=True)
        for name in ("domain", "host"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Machine: {name} must be a number of devices, at least 1, got "
                    f"{value!r}"
                )

    @classmethod
    def named(cls, name: "str | Machine") -> "Machine":
        """Return a machine of the table, or the argument if it is a machine already.

        Args:
          name: such as ``"h100"``. The error of an unknown one lists them.

        Raises:
          TypeError: if it is neither.
          ValueError: if there is none; the text lists those that there are.
        """
        if isinstance(name, Machine):
            return name
        if not isinstance(name, str):
            raise TypeError(
                f"machine must be a name or a jaxcomm.Machine, got {name!r}"
            )
        if name not in MACHINES:
            raise ValueError(
                f"machine {name!r} is unknown: there are {sorted(MACHINES)}. Pass one "
                f"of them, or a jaxcomm.Machine with your numbers"
            )
        return MACHINES[name]


def _check(name: str, value: Any, *, is_zero_fine: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") or (is_zero_fine and value == 0)):
        raise ValueError(f"Machine: {name} must be a positive number, got {value!r}")


# The step is a least-squares fit: what causal layers of 4,096 to 32,768 tokens (32/8
# heads of 128) took with their gradients on four H200s and on two, beyond the rest of
# the model, by the steps of their strategies. `"auto"` stays within 3 % of the fastest
# for 39 to 65 us. Measured by `make bench ARGS="gpu --only strategies"`; the table is
# in tests/attention/test_comparison.py.
_H200 = Machine(
    *(600e12, 350e9, 15e-6, "table: H200, bfloat16, NVLink"), memory=141e9, step=46e-6
)
# The FLOP/s of attention and NVLink's rate are measured on two H200s. H100s have the
# same chip and links. Numbers of a B200 are those of an H200, scaled by 2.
MACHINES: Mapping[str, Machine] = {
    "gpu": _H200,
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200, memory=80e9, source="table: H100, bfloat16, NVLink, as of an H200"
    ),
    "gb200": dataclasses.replace(
        _H200,
        flops=1200e12,
        bytes_per_second=700e9,
        domain=72,
        host=4,
        memory=186e9,
        source="table: GB200 NVL72, bfloat16, scaled from an H200",
    ),
    "cpu": Machine(
        *(150e9, 5e9, 30e-6, "table: one core of a server, shared memory"),
        platform="cpu",
        domain=64,
        host=64,
    ),
}
