import dataclasses
import io

import pytest
from rich.console import Console

from bench import run
from bench.cases import Case
from bench.rows import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fake(Case):
    error: BaseException | None = None

    def measure(self, session):
        if self.error:
            raise self.error
        return [Row(suite=self.suite, name=self.name, devices=self.devices)]


def fakes(*errors):
    of = {"suite": "s", "devices": 2}
    return [Fake(name=str(i), error=error, **of) for i, error in enumerate(errors)]


def test_a_case_that_raises_is_a_row_and_an_interrupt_ends_it(session):
    rows = []
    some = fakes(None, MemoryError("two\nlines"), None, KeyboardInterrupt(), None)
    with pytest.raises(KeyboardInterrupt):
        run.run(some, session, rows, Console(file=io.StringIO()))
    assert [row.name for row in rows] == ["0", "1", "2"]
    assert rows[1].kind == "failed"
    assert rows[1].error == "MemoryError: two lines"
