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
    return [
        Fake(suite="s", name=str(i), devices=2, error=error)
        for i, error in enumerate(errors)
    ]


@pytest.fixture
def pipe():
    return Console(file=io.StringIO())


def test_a_case_that_raises_is_a_row_and_the_rest_goes_on(session, pipe):
    rows = []
    run.run(fakes(None, MemoryError("two\nlines"), None), session, rows, pipe)
    assert [row.name for row in rows] == ["0", "1", "2"]
    assert rows[1].kind == "failed"
    assert rows[1].error == "MemoryError: two lines"


def test_an_interrupt_leaves_the_rows_before_it(session, pipe):
    rows = []
    with pytest.raises(KeyboardInterrupt):
        run.run(fakes(None, KeyboardInterrupt(), None), session, rows, pipe)
    assert [row.name for row in rows] == ["0"]


def test_progress_is_shown_on_a_terminal_alone(session, pipe):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    run.run(fakes(None), session, [], pipe)
    run.run(fakes(None), session, [], terminal)
    assert pipe.file.getvalue() == ""
    assert "s: 0, 2 devices" in terminal.file.getvalue()
