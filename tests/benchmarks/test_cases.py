import contextlib

import numpy as np
import pytest

from bench import cases, roofline
from bench.targets import Target


def timed(build, **options):
    return cases.TimedCase(
        suite="s", name="n", devices=2, work=1e6, build=build, **options
    )


@pytest.mark.parametrize(("bound", "is_met"), [(1e-9, True), (1e9, False)])
def test_a_row_has_the_times_of_every_variant_and_ratios_to_ours(
    bound, is_met, session
):
    both = dict.fromkeys(("jaxcomm", "jax.lax"), lambda: np.ones(3))
    (row,) = timed(lambda: both, target=Target("ratio", bound)).measure(session)
    assert set(row.seconds) == set(row.rates) == set(row.shares) == set(both)
    assert set(row.ratios) == {"jax.lax"}
    assert row.rounds == 2
    assert row.is_met is is_met
    target = {"measure": "ratio", "bound": bound, "met": is_met}
    assert row.to_json()["target"] == target
    for name, spread in row.seconds.items():
        assert 0 < spread.min <= spread.median <= spread.max
        assert row.rates[name] == pytest.approx(1e6 / spread.median)


def test_work_in_flop_is_held_against_the_product(session):
    (row,) = timed(lambda: {"x": lambda: 1.0}, unit=roofline.FLOP).measure(session)
    assert "product" in row.roofline
    assert row.ratios == {}
    assert row.is_met is None


def test_results_that_differ_are_not_timed(session):
    calls = []
    ours = lambda: calls.append(1) or np.zeros(3)  # noqa: E731
    with pytest.raises(ValueError, match=r"results of jax\.lax and jaxcomm differ"):
        timed(lambda: {"jaxcomm": ours, "jax.lax": lambda: np.ones(3)}).measure(session)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.001], None),
        ([1.0, 2.0], [1.0, 2.1], "differ by"),
        ([[1.0], [2.0]], [[1.0, 2.0]], "shape"),
        # Wherever it is, and whosever.
        ([1.0, np.nan], [1.0, 2.0], "differ by nan"),
        ([1.0, 2.0], [-np.inf, 2.0], "differ by nan"),
    ],
)
def test_results_agree_within_the_tolerance(ours, theirs, text):
    results = {"a": np.array(ours), "b": np.array(theirs)}
    refused = (
        pytest.raises(ValueError, match=text) if text else contextlib.nullcontext()
    )
    with refused:
        cases.check_agreement(results, 1e-3)
