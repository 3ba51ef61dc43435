"""The matrix: which fault, in which operation, amid what, under which policy."""

import dataclasses

import waiting

# The kill and the orderly exit need a second process; the rest needs two ranks.
FAULTS = (
    "none",
    "killed",  # rank 1 never comes: SIGKILL while rank 0 waits
    "killed_in_loop",  # both ranks work without a pause, until SIGKILL
    "stopped",  # rank 1 never comes: SIGSTOP while rank 0 waits
    "late",  # rank 1 comes when rank 0 has timed out, and its process knows of that
    "exits",  # rank 1 never comes: its program ends in order
    "refused",  # NCCL refuses a call of rank 0 (stand-in only)
    "async_error",  # NCCL reports an error while rank 0 waits (stand-in only)
    "spoilt",  # one number of one result is changed: shows that WRONG is seen
    "stuck",  # rank 1 never comes: shows that a hang is seen
)

AROUND = (
    "alone",
    "first_use",  # nothing ran before: NCCL keeps the call until rank 1 connects
    "idle_lane",  # a second lane with resources of its own, idle
    "small_behind",  # a small psum is queued behind, on the same lane
    "small_behind_on_other_lane",
    "lax_behind",  # jax.lax.psum of the result is queued behind
    "compute_behind",  # a kernel of seconds is queued behind
    "compute_beside",  # it runs between the start and the done of a pair
    "eight_live",  # eight communicators, of two meshes and four lanes
    "sibling",  # a second lane that shares resources, used after the failure
)


def timeout_seconds(is_gpu: bool) -> float:
    """Return the timeout of waits that are to end by it.

    It also bounds the creation of communicators, which takes longer on GPUs.
    """
    return waiting.EXPIRES_SECONDS * (3 if is_gpu else 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault in one program: of FAULTS, ``programs.OPERATIONS`` and AROUND.

    There are 2 processes of one device each, or 1 of two devices.
    """

    fault: str
    operation: str = "psum_large"
    around: str = "alone"
    on_failure: str = "raise"
    processes: int = 2

    def __str__(self):
        mesh = f"{self.processes}x{2 // self.processes}"
        return "-".join(
            [self.fault, self.operation, self.around, self.on_failure, mesh]
        )

    @property
    def victim(self) -> int | None:
        goes = self.fault in ("killed", "killed_in_loop", "stopped", "exits")
        return 1 if goes else None

    def impatient_lanes(self, is_gpu: bool) -> set[str]:
        """Return the lanes in which only a timeout ends a rank's wait for the other."""
        # With jax 0.11 a process that leaves in order stays until all leave, so its end
        # is not what ends the wait on GPUs.
        if self.fault in ("late", "stopped") or (self.fault == "exits" and is_gpu):
            return {"default"}
        return set()

    @property
    def tries_init(self) -> bool:
        """Whether a survivor tries to make the same communicators again.

        It has stopped its GPUs; in a loop it might have been between two operations.
        Once for each way to lose a process: a survivor that is not refused waits.
        """
        return (
            self.on_failure == "raise"
            and self.fault in ("killed", "exits")
            and (self.operation, self.around) == ("psum_large", "alone")
        )


_starred = []


def _all(fault, *rest, on_failure="raise", processes=2):
    # "exit" is what a policy chooses where processes take part, "raise" in one.
    made = []
    for each in rest:
        operation, around = each.removeprefix("*").split()
        made.append(Case(fault, operation, around, on_failure, processes))
        if each.startswith("*"):
            _starred.append(made[-1])
    return made


# Every operation alone, every surrounding with two operations or more. Each case costs
# two processes. The starred ones are a covering set: each fault, operation, surrounding
# and policy, and each fault with the policies that treat it differently.
KILLED = [
    *_all(
        "killed",
        "psum_large alone", "psum_small alone", "all_gather alone", "ppermute alone",
        "pair alone", "product alone", "psum_of_integers idle_lane",
        "psum_large idle_lane", "psum_small idle_lane", "ppermute idle_lane",
        "psum_large small_behind", "psum_large small_behind_on_other_lane",
        "*all_gather small_behind_on_other_lane", "psum_large lax_behind",
        "*psum_small lax_behind", "psum_large compute_behind",
        "psum_small compute_behind", "*pair compute_beside", "psum_large eight_live",
        "*ppermute eight_live", "product sibling", "hop alone",
        on_failure="exit",
    ),
    *_all(
        "killed_in_loop", "psum_large alone", "*psum_small idle_lane",
        "pair eight_live", on_failure="exit",
    ),
    *_all(
        "killed", "*psum_large alone", "psum_small idle_lane", "pair eight_live",
        "*product sibling", "psum_large lax_behind", "hop idle_lane",
    ),
]  # fmt: skip
LATE = [
    *_all(
        "late", "psum_large alone", "psum_small alone", "pair idle_lane",
        "product sibling", "*ppermute small_behind", "hop alone",
    ),
    *_all("late", "*psum_large alone", "hop small_behind", on_failure="exit"),
]  # fmt: skip
STOPPED = [
    *_all("stopped", "psum_large alone", "*hop idle_lane"),
    *_all("stopped", "*hop small_behind", on_failure="exit"),
]
FIRST_USE = [
    *_all(
        "late", "*psum_large first_use", "all_to_all first_use", "ppermute first_use"
    ),
    *_all(
        "late", "psum_large first_use", "all_to_all first_use", "ppermute first_use",
        on_failure="exit",
    ),
    *_all(
        "late", "psum_large first_use", "*all_to_all first_use", "ppermute first_use",
        on_failure="poison", processes=1,
    ),
]  # fmt: skip
EXITS = _all("exits", "psum_large alone", "*psum_small idle_lane")
IN_ONE_PROCESS = [
    *_all(
        "late", "psum_large alone", "*psum_small small_behind", "product idle_lane",
        "pair lax_behind", "psum_large sibling", "all_gather eight_live", processes=1,
    ),
    *_all("late", "*psum_large alone", on_failure="exit", processes=1),
]  # fmt: skip
# The process survives, so that it can go from one to the next: one test.
IN_TURN_IN_ONE_PROCESS = _all(
    "late", "psum_large alone", "psum_small idle_lane", "all_gather idle_lane",
    "ppermute sibling", "pair alone", "product small_behind", "psum_of_integers alone",
    "psum_large small_behind_on_other_lane", "pair compute_beside",
    "psum_large compute_behind", "product eight_live",
    on_failure="poison", processes=1,
)  # fmt: skip
# No process aborts before the other has poisoned its results, or has gone.
POISON_ACROSS_PROCESSES = [
    *_all(
        "killed", "psum_large alone", "psum_small alone", "product sibling",
        "all_gather idle_lane", "pair compute_beside",
        "psum_large small_behind_on_other_lane", "*hop small_behind", "hop sibling",
        on_failure="poison",
    ),
    *_all("killed_in_loop", "psum_large alone", "*hop alone", on_failure="poison"),
    *_all(
        "late", "psum_large alone", "psum_small alone", "ppermute small_behind",
        "product sibling", "*hop small_behind", on_failure="poison",
    ),
    *_all("exits", "psum_large alone", on_failure="poison"),
]  # fmt: skip
# What cannot be had from the real library on demand.
ERRORS_OF_NCCL = [
    *_all("refused", "psum_large alone", "*psum_of_integers idle_lane"),
    *_all("refused", "*psum_large sibling", processes=1),
    *_all("refused", "product alone", on_failure="poison", processes=1),
    *_all("async_error", "psum_large alone", "*pair sibling"),
    *_all("async_error", "*product idle_lane", processes=1),
    *_all("async_error", "psum_large alone", on_failure="poison", processes=1),
]

ON_GPUS = [
    *KILLED, *LATE, *STOPPED, *FIRST_USE, *EXITS, *IN_ONE_PROCESS,
    *POISON_ACROSS_PROCESSES,
]  # fmt: skip
OVER_STAND_IN = [*ON_GPUS, *ERRORS_OF_NCCL]
COVERING = tuple(_starred)
# Those of the turn that differ most, and what NCCL says by itself.
FEW_IN_TURN = [
    case
    for case in [*IN_TURN_IN_ONE_PROCESS, *ERRORS_OF_NCCL]
    if case.on_failure == "poison"
    and (case.fault != "late" or case.around in ("compute_beside", "compute_behind")
         or case.operation in ("psum_of_integers", "ppermute"))
]  # fmt: skip
