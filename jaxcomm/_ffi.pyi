"""XLA FFI handlers of jaxcomm and the registry of its communicators."""

from collections.abc import Mapping, Sequence


def registrations(has_streams: bool) -> dict:
    """Custom-call targets and their handlers, by stage."""

def call_site_type() -> dict:
    """The type registration of the handlers' state."""

def create_host(key: int, axes: str, lane: str, platform: str, timeout_seconds: float, groups: Sequence[Sequence[int]], process_set: ProcessSet | None = None, processes: Sequence[Sequence[int]] = [], generation: int = 0, hint_if_late: str = '') -> None:
    """Makes a communicator of the host backend under a key."""

def set_hint_if_late(hint: str) -> None:
    """
    Why ranks of this process may be unable to come, for errors and notices.
    """

def begin_program(program: int) -> None:
    """
    Calls instantiated after this under the number belong to a new program.
    """

class Segment:
    """A piece of memory that processes share."""

    def address(self) -> tuple[str, int, int]:
        """Path, bytes and nonce, for others to attach."""

    def forget(self) -> None:
        """Removes its name, once all have attached."""

    def resident_bytes(self) -> int:
        """Bytes of touched pages."""

class ProcessSet:
    """Processes that share a segment."""

def create_segment(processes: int, named: bool) -> Segment:
    """Makes and formats a segment for a number of processes."""

def attach_segment(path: str, bytes: int, nonce: int, processes: int) -> Segment:
    """
    Attaches to a segment that another process made for this number of processes.
    """

def shared_memory_layout() -> int:
    """A number that processes must agree on before they share a segment."""

def process_set(segment: Segment, peers: Sequence[tuple[int, int, int]], self: int, grace_seconds: float = 2.0) -> ProcessSet:
    """Joins the processes (pid, start time, index) of a segment."""

def sentinel_thread() -> int:
    """
    The id of an idle thread that ends as soon as this process begins to end.
    """

def has_ended(pid: int, start_time: int, thread: int) -> bool:
    """Whether another process of this host has certainly ended, or begun to."""

def process_start_time(pid: int) -> int:
    """
    When a process started, in clock ticks after boot; 0 if there is no such process.
    """

def load_nccl(paths: Sequence[str]) -> dict:
    """Loads NCCL and the CUDA driver, and says what was found."""

def nccl_unique_id() -> bytes:
    """What the ranks of a new world know it by."""

class NcclWorldHealth:
    """What a world's processes know of each other's ends."""

    def is_broken(self) -> bool:
        """Whether a communicator of the world was, or is to be, ended by force."""

    def gone(self) -> list[int]:
        """Processes that this one saw end, by JAX's index."""

    def settle(self) -> None:
        """Lets this process abort what it has poisoned: so have all others."""

class NcclWorld:
    """The NCCL communicator of a whole mesh."""

    @property
    def device_bytes(self) -> int:
        """Device memory it took, on the devices of this process."""

    @property
    def health(self) -> NcclWorldHealth:
        """Outlives it."""

    @property
    def is_broken(self) -> bool:
        """Whether one that was split off it was ended by force."""

def nccl_world(size: int, devices: Sequence[tuple[int, int, int]], unique_id: bytes, numbers: Mapping[str, int], name: str, timeout_seconds: float, peers: Sequence[tuple[int, int, int, int]]) -> NcclWorld:
    """
    Joins the ranks that know the id; devices are (global id, ordinal, rank).
    """

def create_nccl(world: NcclWorld, key: int, axes: str, lane: str, platform: str, timeout_seconds: float, groups: Sequence[Sequence[int]], processes: Sequence[Sequence[int]], numbers: Mapping[str, int], name: str, copy_engines: bool, one_shot: bool, device_sizes: bool, arena_bytes: int, on_failure: str, check: bool) -> None:
    """Splits a communicator off a world, under a key."""

def prepare_data_dependent(key: int) -> None:
    """Makes what collectives need whose moves depend on numbers of devices."""

class SymmetricMemory:
    """A segment of memory on each local device."""

    @property
    def segment(self) -> int:
        """Its number in this process."""

    @property
    def bytes(self) -> int:
        """Its size on each device."""

    @property
    def used_bytes(self) -> int:
        """What is taken of them."""

    @property
    def blocks(self) -> int:
        """Parts that arrays hold."""

    def take(self, bytes: int) -> int:
        """The offset of a new block."""

    def fill(self, ordinal: int, offset: int, source: int, bytes: int) -> None:
        """Copies from an address of the device; 0 writes zeros."""

    def reset(self) -> None:
        """Takes all blocks back; refuses while arrays hold some."""

    def close(self) -> None:
        """Deregisters and frees it; refuses while arrays hold blocks."""

def symmetric_memory(ordinals: Sequence[int], bytes: int) -> SymmetricMemory:
    """Allocates so many bytes with ncclMemAlloc on each of these devices."""

def symmetric_block(memory: SymmetricMemory, ordinal: int, dlpack_device: tuple[int, int], offset: int, shape: Sequence[int], dtype_code: int, dtype_bits: int) -> object:
    """One device's part of a block, for DLPack."""

def arena_bytes() -> int:
    """Device memory that other ranks map, on the devices of this process."""

def refuse_if_stopped() -> None:
    """Raises if the GPUs of this process were stopped."""

def first_failure() -> str:
    """What failed first of this process's collectives over NCCL, or ""."""

def forget_failures() -> None:
    """
    Has first_failure() tell of those that come: all communicators are closed.
    """

def wait_for_aborts(seconds: float) -> bool:
    """
    Waits for threads that abort operations of NCCL; returns whether all are done.
    """

def end_process(text: str) -> None:
    """Ends this process with a message, flight records and status 70."""

def fail_worlds(reason: str) -> None:
    """
    Fails the communicators of NCCL that span processes: another process failed.
    """

def register_memory(key: int, memory: SymmetricMemory) -> str:
    """Registers it with a communicator; returns how, or why not."""

def deregister_memory(key: int, memory: SymmetricMemory) -> None:
    """Undoes it here, where other processes have it otherwise."""

def one_shot_bytes(size: int) -> int:
    """
    Device memory for small sums of a group of so many ranks; 0 if it has none.
    """

def shared_memory_bytes(processes: int) -> int:
    """Bytes of the shared memory of so many processes."""

MOST_SHARING_PROCESSES: int = 64

def destroy(key: int) -> None:
    """Ends a communicator; calls that wait in it raise."""

def stats(key: int) -> dict:
    """Calls and bytes of a communicator, empty if there is none."""

def interrupt_waits() -> None:
    """Have what ranks of this process wait in now end within a second."""

def counters() -> dict:
    """Communicators created, destroyed and live."""

def flight_record(key: int | None, reason: str) -> str:
    """The last operations of a communicator, or of all, as JSON."""

def prepare_flight_dumps(process: int, processes: int, devices: Sequence[tuple[str, Sequence[int]]], folder: str, says: bool) -> bool:
    """
    Sets the identity of this process and the folder of its flight records; returns whether it answers SIGUSR1.
    """

def use_stack_server(request: int, answer: int, file: int) -> None:
    """
    Descriptors of the thread that writes the stacks of all Python threads.
    """

def dump_flight_records(reason: str) -> None:
    """Writes the flight records after a failure."""
