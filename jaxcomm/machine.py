"""What devices and their links do: one value for every figure that is planned."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured collective.

    Attributes:
      collective: of the C++ planner, ``"all_reduce"``.
      transport: ``"memory"``, ``"shared memory"`` or ``"nccl"``.
      ranks: of the group.
      bytes: of a rank's operand.
      seconds: from the arrival of the last rank to the end of the last.
    """

    collective: str
    transport: str
    ranks: int
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a device and its links do.

    A domain is the devices that fast links join, as NVLink does. A host is the devices
    of one operating system. Devices are numbered host by host.

    Attributes:
      flops: FLOP/s of attention, of one device.
      bytes_per_second: of one device, one way, within a domain.
      latency: seconds of a send within a domain.
      source: where the numbers are from.
      platform: of the devices, as JAX names it.
      domain: devices of a domain.
      host: devices of a host.
      network_bytes_per_second: of one device, one way, between domains.
      network_latency: seconds of a send between domains.
      memory: bytes of one device.
      memory_bytes_per_second: that all CPU devices of a host read and write together.
      cores: of a host, which CPU devices share; 0 if unknown.
      create_seconds: to make a communicator, for each of its ranks; 0 if unknown.
      store_seconds: of one message to the key-value store; 0 if unknown.
      samples: measured collectives, if ``python -m jaxcomm.doctor --calibrate`` wrote
        the machine.

    Example:
      >>> machine = jaxcomm.Machine.named("h200")
      >>> machine.domain, machine.bytes_per_second, machine.network_bytes_per_second
      (8, 350000000000.0, 50000000000.0)
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
    network_bytes_per_second: float = 50e9
    network_latency: float = 30e-6
    memory: float = 0
    memory_bytes_per_second: float = 40e9
    cores: int = 0
    create_seconds: float = 0
    store_seconds: float = 0
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            *("flops", "bytes_per_second", "network_bytes_per_second"),
            "memory_bytes_per_second",
        ):
            _check(name, getattr(self, name), is_zero_fine=False)
        for name in (
            *("latency", "network_latency", "memory", "cores", "create_seconds"),
            "store_seconds",
        ):
            _check(name, getattr(self, name), is_zero_fine=True)
        for name in ("domain", "host"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Machine: {name} must be a number of devices, at least 1, got "
                    f"{value!r}"
                )
        for each in self.samples:
            if not isinstance(each, Sample):
                raise TypeError(
                    f"Machine: samples must be jaxcomm.planning.Sample values, got "
                    f"{each!r}"
                )

    @classmethod
    def named(cls, name: str) -> "Machine":
        """Return a machine of the table.

        Args:
          name: a key of ``jaxcomm.planning.MACHINES``, such as ``"h100"``.

        Raises:
          ValueError: if there is none; the text lists those that there are.
        """
        if name not in MACHINES:
            raise ValueError(
                f"machine {name!r} is unknown: there are {sorted(MACHINES)}. Pass one "
                f"of them, or a jaxcomm.Machine; `python -m jaxcomm.doctor --calibrate "
                f"FILE` measures one, and jaxcomm.Machine.load(FILE) reads it"
            )
        return MACHINES[name]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Machine":
        """Read a machine that :meth:`save` or the doctor wrote.

        Raises:
          OSError: the file cannot be read.
          ValueError: it does not hold a machine.
        """
        with open(path, "rb") as file:
            text = file.read()
        try:
            document = json.loads(text)
            samples = tuple(Sample(**each) for each in document.pop("samples", ()))
            return cls(**document, samples=samples)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no machine of jaxcomm: {error}. Write one by "
                f"`python -m jaxcomm.doctor --calibrate FILE`"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)

    def over_network(self) -> "Machine":
        """Return the machine as ranks in different domains see each other.

        >>> Machine.named("h200").over_network().bytes_per_second
        50000000000.0
        """
        return dataclasses.replace(
            self,
            bytes_per_second=self.network_bytes_per_second,
            latency=self.network_latency,
            source=f"{self.source}, between domains",
        )


def of(machine: "str | Machine", what: str) -> Machine:
    """Return a machine, given by its name or itself; ``what`` asks, for messages.

    >>> of("cpu", "plan").platform
    'cpu'
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str):
        return Machine.named(machine)
    raise TypeError(
        f"{what}: machine must be a name or a jaxcomm.Machine, got {machine!r}"
    )


def _check(name: str, value: Any, *, is_zero_fine: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") or (is_zero_fine and value == 0)):
        raise ValueError(f"Machine: {name} must be a positive number, got {value!r}")


_H200 = Machine(600e12, 350e9, 15e-6, "table: H200, bfloat16, NVLink", memory=141e9)
# Rates are those of vendors' sheets, less what NCCL loses: NVLink 4 has 450 GB/s one
# way, NVLink 5 900, a 400 Gb/s card 50. The FLOP/s of attention and NVLink's rate are
# measured on two H200s; H100s have the same chip and links, B200s are scaled by 2.
MACHINES: Mapping[str, Machine] = {
    "gpu": _H200,
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200, memory=80e9, source="table: DGX H100, bfloat16, NVLink, 400 Gb/s a GPU"
    ),
    "gb200": dataclasses.replace(
        _H200,
        flops=1200e12,
        bytes_per_second=700e9,
        domain=72,
        host=4,
        memory=186e9,
        source="table: GB200 NVL72, bfloat16, scaled from H200; 400 Gb/s a GPU",
    ),
    "cpu": Machine(
        *(150e9, 5e9, 30e-6, "table: one core of a server, shared memory"),
        platform="cpu",
        domain=64,
        host=64,
        network_bytes_per_second=1e9,
        network_latency=100e-6,
    ),
}
