"""Flight records as pictures."""

import json
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from jaxcomm.diagnostics import plot
from jaxcomm.diagnostics.flight_record import FlightRecord

ALL = "0123"


@pytest.fixture(autouse=True)
def no_window():
    mpl.use("agg")
    yield
    plt.close("all")


def bars_of(ax):
    """Returns the corners of the bars by the name in the legend."""
    return {
        bars.get_label(): [path.get_extents().extents for path in bars.get_paths()]
        for bars in ax.collections
    }


def test_a_rank_has_a_row_and_an_operation_a_bar(job):
    job.did(ALL, "psum").did(ALL, "pmax", seconds=0.25)
    ax = plot.plot(job.merged())
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rank 0 (cpu:0)", "rank 1 (cpu:1)", "rank 2 (cpu:2048)", "rank 3 (cpu:2049)",
    ]  # fmt: skip
    # The first rank is on top.
    assert ax.get_ylim() == (3.5, -0.5)
    found = bars_of(ax)
    assert set(found) == {"psum", "pmax"}
    assert [bar[0] for bar in found["pmax"]] == pytest.approx([1000] * 4)
    assert [bar[2] for bar in found["pmax"]] == pytest.approx([1250] * 4)
    middles = sorted((bar[1] + bar[3]) / 2 for bar in found["psum"])
    assert middles == pytest.approx([0, 1, 2, 3])
    assert ax.get_xlabel().startswith("ms after ")
    assert ax.get_title(loc="left") == "4 ranks spent 60% of 1.25 s in collectives"
    colors = {tuple(bars.get_facecolor()[0]) for bars in ax.collections}
    assert len(colors) == 2


def test_what_did_not_end_is_hatched_and_the_title_says_who_is_missing(job):
    job.did(ALL, "psum").did("013", "psum(float32[8])", "started")
    ax = plot.plot(job.merged())
    found = bars_of(ax)
    assert set(found) == {"psum", "psum, not ended"}
    hatches = {bars.get_label(): bars.get_hatch() for bars in ax.collections}
    assert hatches["psum, not ended"]
    assert not hatches["psum"]
    assert ax.get_title(loc="left").startswith("rank 2 (process 1, cpu:2048) last comp")
    # To the end of the record.
    assert [bar[2] for bar in found["psum, not ended"]] == pytest.approx([2] * 3)
    assert ax.get_xlabel().startswith("s after ")


def test_operations_that_overlap_are_side_by_side(job):
    job.did(0, "permute", seconds=2.5).did(0, "psum")
    found = bars_of(plot.plot(job.merged()))
    ((_, send_top, _, send_bottom),) = found["permute"]
    ((_, sum_top, _, sum_bottom),) = found["psum"]
    assert -0.5 < send_top < send_bottom <= sum_top < sum_bottom < 0.5


def test_it_draws_into_given_axes(job):
    job.did("01", "psum")
    _, (one, other) = plt.subplots(2)
    assert FlightRecord(json.dumps(job.document(0))).plot(other) is other
    assert not one.collections
    assert len(other.collections) == 1


def test_without_matplotlib_the_error_says_what_to_install(job, monkeypatch):
    job.did("01", "psum")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxcomm\[plot\]'"):
        FlightRecord(json.dumps(job.document(0))).plot()
