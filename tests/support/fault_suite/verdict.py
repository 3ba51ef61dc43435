"""What a case must come to, by its fault and its policy."""

import re

from fault_suite.cases import DEADLINE_SECONDS, LATE_SECONDS, Case
from fault_suite.outcomes import EXITED, HUNG, POISONED, RAISED, RIGHT, WRONG
from fault_suite.programs import OPERATIONS, RANKS
from fault_suite.report import Report, Row
from fault_suite.runner import Hardware

# For what keeps a device busy.
_BUSY_SECONDS = 5.0
_OF_NCCL = ("refused", "async_error")
# Of the cause, in what a survivor says.
_CAUSES = {
    "killed": r"\b(process|rank) 1\b",
    "killed_in_loop": r"\b(process|rank) 1\b",
    "exits": r"\b(process|rank) 1\b",
    "late": rf"\b{DEADLINE_SECONDS:g} s\b",
    # The rank without the error may know no more than that the other did not come.
    "refused": rf"nccl|\b{DEADLINE_SECONDS:g} s\b",
    "async_error": rf"nccl|\b{DEADLINE_SECONDS:g} s\b",
}

# Of a process whose GPUs are lost.
_LOST = r"\bGPU"


def problems(report: Report, hardware: Hardware) -> list[str]:
    """Returns all that must not be, in words; empty if the case is as it must be."""
    case = report.case
    if report.trouble:
        return [report.trouble]
    found = [_told(row) for row in report.rows if row.outcome in (WRONG, HUNG)]
    found += [
        f"process {index} had to be killed {end.seconds:.1f} s after it was to end"
        for index, end in report.ends.items()
        if end.status is None
    ]
    found += [f"/dev/shm/{name} was left" for name in report.left]
    if case.fault in ("none", "spoilt", "stuck"):
        return found + _of_no_fault(report)
    for rank in range(RANKS):
        if case.processes == 1 or rank != case.victim:
            found += _of_rank(report, rank, hardware)
    for process in range(case.processes):
        if process != case.victim:
            found += _of_process(report, process, hardware)
    return found


def _of_no_fault(report):
    found = [
        _told(row) for row in report.rows if row.outcome not in (RIGHT, WRONG, HUNG)
    ]
    return found + [
        f"process {index} ended with {end.status}"
        for index, end in report.ends.items()
        if end.status != 0
    ]


def _of_rank(report, rank, hardware):
    case = report.case
    of_rank = {row.what: row for row in report.rows if row.rank == rank}
    result = of_rank.get("result")
    if result is None:
        return [f"rank {rank} said nothing of its result"]
    found = _late(case, result, hardware)
    allowed = _allowed(case, rank, hardware)
    if result.outcome == EXITED and EXITED in allowed["result"]:
        return found
    for what, outcome in allowed.items():
        row = of_rank.pop(what, None)
        if row is None:
            found.append(f"rank {rank} said nothing of {what!r}")
        elif row.outcome not in outcome | {WRONG, HUNG}:
            found.append(f"{_told(row)}; it must be {' or '.join(sorted(outcome))}")
        elif what in _with_cause(case, hardware) and row.outcome == RAISED:
            found += _lacks_cause(_LOST if what == "anew" else _CAUSES[case.fault], row)
    for row in of_rank.values():
        if row.outcome not in (WRONG, HUNG):
            found.append(f"{_told(row)}, which nobody asked for")
    return found


def _allowed(case: Case, rank: int, hardware: Hardware) -> dict[str, set[str]]:
    """Returns what each thing may come to on a rank."""
    poisons = case.on_failure == "poison"
    if case.on_failure == "exit":
        return {"result": {EXITED}}
    # On GPUs the context is gone with the first error; the process cannot go on.
    loses_gpus = hardware.is_gpu and not poisons
    result = {POISONED} if poisons else {RAISED, EXITED}
    if poisons and (
        (case.fault in ("late", "async_error") and rank == RANKS - 1)
        or (case.fault in _OF_NCCL and rank == 0)
    ):
        # Its own call meets the failure.
        result = {POISONED, RAISED}
    allowed = {"result": result}
    if case.around in ("small_behind", "small_behind_on_other_lane", "lax_behind"):
        allowed["behind"] = {POISONED, RAISED} if poisons else {RAISED}
    if case.around in ("compute_behind", "compute_beside"):
        # It has no part in the failure: where it is read, it must be right.
        what = case.around.removeprefix("compute_")
        allowed[what] = {RIGHT} if poisons else {RAISED, RIGHT}
    allowed["next"] = {RAISED}
    if case.around == "sibling":
        allowed["other lane"] = {RAISED}
    if case.around == "idle_lane":
        if loses_gpus or case.victim is not None:
            allowed["other lane"] = {RAISED}
        elif case.processes == 1:
            allowed["other lane"] = {RIGHT}
        else:
            # Processes come to it when they have failed, which is not at one time.
            allowed["other lane"] = {RAISED, RIGHT}
    if case.processes == 1 or case.victim is not None:
        allowed["anew"] = {RAISED} if loses_gpus else {RIGHT}
    return allowed


def _with_cause(case, hardware):
    """Returns of what the text that is raised must name the cause."""
    if hardware.is_gpu and case.on_failure == "raise":
        # CUDA's error; the cause is on stderr. What is made anew is refused by us.
        return ("anew",)
    own_lane = case.around == "idle_lane" and case.victim is None
    return ("next",) if own_lane else ("next", "other lane")


def _lacks_cause(pattern, row):
    if re.search(pattern, row.text, re.IGNORECASE):
        return []
    return [f"{_told(row)}: it does not say {pattern!r}"]


def _late(case, row: Row, hardware):
    """Returns whether a rank got its result too late, or before the deadline."""
    least, most = 0.0, hardware.patience_seconds
    if case.around == "compute_beside" and case.on_failure == "poison":
        # The results of a program are there when all of them are.
        most += _BUSY_SECONDS
    elif case.fault in ("killed", "killed_in_loop") and case.on_failure != "exit":
        most = hardware.notice_seconds
    elif case.fault == "late":
        is_late = row.rank == RANKS - 1
        least = 0.0 if is_late else DEADLINE_SECONDS
        most += DEADLINE_SECONDS + is_late * LATE_SECONDS
    elif case.fault in _OF_NCCL:
        most += DEADLINE_SECONDS + LATE_SECONDS
    if least <= row.seconds <= most or row.outcome == HUNG:
        return []
    return [f"{_told(row)}; it must take {least:g} to {most:g} s"]


def _of_process(report, process, hardware):
    """Returns what a process failed to say, and how it may not end."""
    case = report.case
    end = report.ends.get(process)
    if end is None:
        return []
    found = []
    results = report.of("result")
    own = [
        row for row in results.values() if case.processes == 1 or row.rank == process
    ]
    if any(row.outcome == EXITED for row in own):
        if end.status in (0, None):
            found.append(f"process {process} ended with status {end.status}")
        if process > 0 and results[0].outcome == EXITED:
            # JAX may have ended it for the end of the coordinator.
            return found
    if case.on_failure == "exit" and not any(path in end.said for path in end.dumps):
        found.append(f"process {process} named no dump: {end.said[-1000:]}")
    if case.on_failure == "exit" and not end.dumps:
        found.append(f"process {process} left no dump")
    texts = [line for line in end.said.splitlines() if line.startswith("jaxcomm: ")]
    if not (hardware.is_gpu and case.on_failure == "raise"):
        texts += [row.text for row in report.rows if _is_of(case, row, process)]
    wanted = (
        rf"\b{OPERATIONS[case.operation].name}",
        r"axes \('i',\)",
        r"\brank \d",
        _CAUSES[case.fault],
    )
    if not any(
        all(re.search(part, text, re.IGNORECASE) for part in wanted) for text in texts
    ):
        found.append(
            f"process {process} did not name operation, axes, rank and cause in one "
            f"line, but said {texts}"
        )
    return found


def _is_of(case, row, process):
    return case.processes == 1 or row.rank == process


def _told(row):
    text = " ".join(row.text.split())[:300]
    return (
        f"rank {row.rank}: {row.what!r} {row.outcome} after {row.seconds:.3f} s"
        f"{': ' if text else ''}{text}"
    )
