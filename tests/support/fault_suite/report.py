"""What became of a case."""

import dataclasses

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
        return {row.rank: row for row in self.rows if row.what == what}

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {"id": str(self.case)}
