import numpy as np
import pytest

from bench import cases, roofline
from bench.targets import Target


def timed(build, **options):
    return cases.TimedCase(
        suite="s", name="n", devices=2, work=1e6, build=build, **options
    )


def test_a_row_has_the_times_of_every_variant_and_ratios_to_ours(session):
    x = np.ones(3)
    build = lambda: {"jaxcomm": lambda: x, "jax.lax": lambda: x}  # noqa: E731
    (row,) = timed(build, target=Target("ratio", 1e-9)).measure(session)
    assert (
        set(row.seconds) == set(row.rates) == set(row.shares) == {"jaxcomm", "jax.lax"}
    )
    assert set(row.ratios) == {"jax.lax"}
    assert row.rounds == 2
    assert row.is_met is True
    for spread in row.seconds.values():
        assert 0 < spread.min <= spread.median <= spread.max


def test_work_in_flop_is_held_against_the_product(session):
    (row,) = timed(lambda: {"x": lambda: 1.0}, unit=roofline.FLOP).measure(session)
    assert "product" in row.roofline
    assert row.ratios == {}
    assert row.is_met is None


def test_a_missed_target_is_a_row_like_any_other(session):
    build = lambda: {"jaxcomm": lambda: 0.0, "jax.lax": lambda: 0.0}  # noqa: E731
    (row,) = timed(build, target=Target("ratio", 1e9)).measure(session)
    assert row.is_met is False
    assert row.to_json()["target"] == {"measure": "ratio", "bound": 1e9, "met": False}


def test_results_that_differ_are_not_timed(session):
    calls = []

    def ours():
        calls.append(1)
        return np.zeros(3)

    with pytest.raises(ValueError, match=r"results of jax\.lax and jaxcomm differ"):
        timed(lambda: {"jaxcomm": ours, "jax.lax": lambda: np.ones(3)}).measure(session)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        ([1.0, 2.0], True),
        ([1.0, 2.001], True),
        ([1.0, 2.1], False),
        ([1.0, np.nan], False),
    ],
)
def test_results_agree_within_the_tolerance(found, agrees):
    results = {"a": np.array([1.0, 2.0]), "b": np.array(found)}
    if agrees:
        cases.check_agreement(results, 1e-3)
    else:
        with pytest.raises(ValueError, match="differ"):
            cases.check_agreement(results, 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whose", ["a", "b"])
def test_what_is_no_number_agrees_with_nothing_whosever_it_is(whose, bad):
    results = {"a": np.arange(9.0), "b": np.arange(9.0)}
    results[whose][3] = bad
    with pytest.raises(ValueError, match="differ by nan"):
        cases.check_agreement(results, 1e-3)


def test_results_of_other_shapes_do_not_agree():
    results = {"a": np.zeros((2, 1)), "b": np.zeros((2, 2))}
    with pytest.raises(ValueError, match="shape"):
        cases.check_agreement(results, 1e-3)


def test_a_result_in_another_order_is_aligned_first(session):
    case = timed(
        lambda: {"jaxcomm": lambda: np.arange(3), "b": lambda: np.arange(3)[::-1]},
        align=lambda name, result: result[::-1] if name == "b" else result,
    )
    assert case.measure(session)[0].rounds == 2
