"""What became of a case, as rows for a table and as JSON."""

import collections
import dataclasses
import json

from fault_suite.cases import Case


@dataclasses.dataclass
class Row:
    """What one rank got of one thing: an outcome, and what was raised or is wrong.

    The thing is ``"result"``, of the operation; ``"behind"`` or ``"beside"``, of what
    was queued with it; ``"next"``, of the next call; ``"other lane"``; ``"anew"``,
    after finalize() and init().
    """

    what: str
    rank: int
    outcome: str
    text: str = ""


@dataclasses.dataclass
class End:
    """How a process ended; the status is None if the runner had to kill it."""

    status: int | None
    said: str = ""
    dumps: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """What became of a case.

    Attributes:
      case: the case.
      rows: as they came.
      ends: of the processes, by index; of the last case of several.
      trouble: why the case could not be run, "" if it could.
      is_prefilled: whether every result's memory held a pattern before the run.
      left: names in /dev/shm that outlived the processes.
    """

    case: Case
    rows: list[Row] = dataclasses.field(default_factory=list)
    ends: dict[int, End] = dataclasses.field(default_factory=dict)
    trouble: str = ""
    is_prefilled: bool = False
    left: list[str] = dataclasses.field(default_factory=list)

    def of(self, what: str) -> dict[int, Row]:
        """Return the rows of one thing, by rank."""
        return {row.rank: row for row in self.rows if row.what == what}

    def to_json(self) -> dict:
        """Return the report as plain values."""
        return dataclasses.asdict(self) | {"id": str(self.case)}


def table(reports: list[dict]) -> str:
    """Return a Markdown table of reports that ``to_json`` gave."""
    lines = ["| case | rank | outcome | then |", "| --- | --- | --- | --- |"]
    for report in reports:
        by_rank = collections.defaultdict(list)
        for row in report["rows"]:
            by_rank[row["rank"]].append(f"{row['what']} {row['outcome']}")
        for rank, (result, *then) in sorted(by_rank.items()):
            outcome = result.removeprefix("result ")
            lines.append(f"| {report['id']} | {rank} | {outcome} | {', '.join(then)} |")
    return "\n".join(lines)


def summary(reports: list[dict]) -> str:
    """Return in a line how many results there were of each outcome."""
    rows = [row for report in reports for row in report["rows"]]
    counts = collections.Counter(
        row["outcome"] for row in rows if row["what"] == "result"
    )
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{len(reports)} cases; results of ranks: {found}"


def write(reports: list[dict], path: str) -> None:
    """Write the reports to a file, as JSON."""
    with open(path, "w") as file:
        json.dump(reports, file, indent=1)
