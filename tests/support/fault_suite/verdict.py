"""What a case must come to, by its fault and its policy."""

import re

from fault_suite.cases import Case, timeout_seconds
from fault_suite.outcomes import EXITED, HUNG, POISONED, RAISED, RIGHT, WRONG
from fault_suite.programs import OPERATIONS, RANKS
from fault_suite.report import Report
from fault_suite.runner import Hardware

# Of a process that jaxcomm ends.
_EXIT_STATUS = 70
_TIMEOUT = r"\b(" + "|".join(f"{timeout_seconds(on):g}" for on in (0, 1)) + r") s\b"
# Of the cause, in what a survivor says.
_CAUSES = {
    "killed": r"\b(process|rank) 1\b",
    "killed_in_loop": r"\b(process|rank) 1\b",
    "exits": rf"\b(process|rank) 1\b|{_TIMEOUT}",
    "late": _TIMEOUT,
    "stopped": _TIMEOUT,
    "refused": "nccl",
    "async_error": "nccl",
}

# Of a process whose GPUs are lost.
_LOST = r"\bGPU"


def problems(report: Report, hardware: Hardware) -> list[str]:
    """Return all that must not be, in words; empty if the case is as it must be."""
    case = report.case
    if report.trouble:
        return [report.trouble]
    found = [_told(row) for row in report.rows if row.outcome in (WRONG, HUNG)]
    found += [
        f"process {index} had to be killed"
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
    found = []
    allowed = _allowed(case, rank, hardware)
    if result.outcome == EXITED and EXITED in allowed["result"]:
        return found
    if case.on_failure == "exit" and result.outcome in allowed["result"]:
        return found
    for what, outcome in allowed.items():
        row = of_rank.pop(what, None)
        if row is None:
            found.append(f"rank {rank} said nothing of {what!r}")
        elif row.outcome not in outcome | {WRONG, HUNG}:
            found.append(f"{_told(row)}; it must be {' or '.join(sorted(outcome))}")
        elif what in _with_cause(case, hardware) and row.outcome == RAISED:
            is_new = what in ("anew", "init")
            found += _lacks_cause(_LOST if is_new else _CAUSES[case.fault], row)
    for what, row in of_rank.items():
        if row.outcome not in (WRONG, HUNG) and what != "afterwards":
            found.append(f"{_told(row)}, which nobody asked for")
    return found


def _allowed(case: Case, rank: int, hardware: Hardware) -> dict[str, set[str]]:
    """Return what each thing may come to on a rank."""
    poisons = case.on_failure == "poison"
    if case.on_failure == "exit":
        # The process of the late rank had nothing on its way, or has not ended yet.
        is_late = case.fault == "late" and rank == RANKS - 1
        idle = {RAISED} if is_late or _may_be_idle(case, rank) else set()
        return {"result": {EXITED} | idle}
    result = {POISONED} if poisons else {RAISED, EXITED}
    # In a loop it may be between two operations.
    is_met_later = (
        case.fault in ("refused", "killed_in_loop")
        or case.operation == "pair"
        or case.around == "first_use"
    )
    if poisons and (is_met_later or rank == RANKS - 1):
        # Its own call meets the failure, or the call that ends it.
        result = {POISONED, RAISED}
    if case.fault == "late" and case.processes > 1 and rank == RANKS - 1:
        # The other rank may have sent it all it needs before the deadline.
        result = result | {RIGHT}
    allowed = {"result": result}
    if case.around in ("small_behind", "small_behind_on_other_lane", "lax_behind"):
        allowed["behind"] = {POISONED, RAISED} if poisons else {RAISED}
        if poisons and case.around == "small_behind_on_other_lane":
            # It has resources of its own: both ranks may have come to it before.
            allowed["behind"] = {POISONED, RAISED, RIGHT}
    # It has no part in the failure: where it is read, it must be right. A program that
    # fails has no result at all.
    if case.around == "compute_behind":
        allowed["behind"] = {RIGHT} if poisons else {RAISED, RIGHT}
    if case.around == "compute_beside":
        allowed["beside"] = {RAISED, RIGHT}
    allowed["next"] = {RAISED}
    if case.around == "sibling":
        allowed["other lane"] = {RAISED}
    if case.around == "idle_lane":
        allowed["other lane"] = {RAISED}
        if case.victim is None and _may_be_idle(case, rank):
            allowed["other lane"] = {RAISED, RIGHT}
    if case.tries_init:
        allowed["init"] = {RAISED}
    if case.processes == 1 or case.victim is not None:
        allowed["anew"] = {RIGHT} if poisons else {RAISED}
        alone = case.processes > 1 and not hardware.is_gpu
        if not poisons and (alone or _may_be_idle(case, rank)):
            # A mesh of one CPU device has no need of the stand-in's GPUs.
            allowed["anew"] = {RIGHT, RAISED}
    return allowed


def _may_be_idle(case, rank):
    """Return whether the rank's process may have no operation on its way at the fault.

    Then its GPUs are not stopped: the next call raises, and it can go on.
    """
    is_late = case.fault in ("late", "async_error") and case.processes > 1
    return case.fault in ("killed_in_loop", "refused") or (is_late and rank == 1)


def _with_cause(case, hardware):
    """Return of what the text that is raised must name the cause."""
    causes = ["init"]
    if case.on_failure == "raise" and case.processes == 1:
        # We refuse it. A mesh of one device is no matter of ours.
        causes.append("anew")
    if hardware.is_gpu and case.on_failure == "raise":
        # What was made before raises CUDA's error; the cause is on stderr.
        return causes
    if case.around == "sibling" or case.victim is not None:
        causes.append("other lane")
    return [*causes, "next"]


def _lacks_cause(pattern, row):
    if re.search(pattern, row.text, re.IGNORECASE):
        return []
    return [f"{_told(row)}: it does not say {pattern!r}"]


def _of_process(report, process, hardware):
    """Return what a process failed to say, and how it may not end."""
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
        if process > 0 and 0 in results and results[0].outcome == EXITED:
            # JAX may have ended it for the end of the coordinator.
            return found
        # A crash is no end that anybody chose. But a host callback of JAX's crashes
        # where the GPU has failed.
        is_callback = hardware.is_gpu and "XlaFfiPythonGpuCallback" in end.said
        # Who is late in one process is waited for.
        is_callback &= case.fault != "late" or case.processes > 1
        if end.status is None or (end.status <= 0 and not is_callback):
            found.append(f"process {process} ended with status {end.status}")
        if case.on_failure == "exit" and not end.dumps:
            found.append(f"process {process} left no dump")
        if case.on_failure == "exit" and not any(
            path in end.said for path in end.dumps
        ):
            found.append(f"process {process} named no dump: {end.said[-1000:]}")
    # Under "exit", a call may raise before another thread has ended the process.
    is_chosen = case.on_failure == "exit" and end.status == _EXIT_STATUS
    if not is_chosen and any(
        row.what == "afterwards" and row.outcome == EXITED
        for row in report.rows
        if _is_of(case, row, process)
    ):
        found.append(
            f"process {process} ended with status {end.status} after its result: "
            f"{end.said[-1000:]}"
        )
    texts = [line for line in end.said.splitlines() if line.startswith("jaxcomm: ")]
    # Where GPUs were stopped, exceptions say what CUDA says.
    stopped = case.on_failure == "raise" and not _may_be_idle(case, process)
    if not (hardware.is_gpu and stopped):
        texts += [row.text for row in report.rows if _is_of(case, row, process)]
    cause = _CAUSES[case.fault]
    if process > 0 and 0 in results and results[0].outcome == EXITED:
        # It may see no more than that the other has ended, for whatever cause.
        cause += r"|\bprocess 0\b"
    named = OPERATIONS[case.operation].name
    if case.around == "small_behind_on_other_lane":
        # It waits for the same process, and may be the first that is looked at.
        named = rf"({named}|{OPERATIONS['psum_small'].name})"
    wanted = (rf"\b{named}", r"axes \('i',\)", r"\brank \d", cause)
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
    return f"rank {row.rank}: {row.what!r} {row.outcome}{': ' if text else ''}{text}"
