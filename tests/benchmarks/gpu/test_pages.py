"""Tables of pages from rows of ``bench gpu``."""

from bench.gpu import pages, rows

ONE = "one flash kernel over the whole sequence, divided by 2"


def lines(part, *figures):
    made = [rows.to_json(part, figure) for figure in figures]
    return pages.tables(made).splitlines()


def figure(name, ours, ratio, peer="jax.lax", note=""):
    return rows.Figure(name, ours, peer, ours * ratio, ratio, note=note)


def test_no_row_is_lost_and_what_is_lost_is_in_italics():
    found = lines(
        "a", figure("psum 1 KiB", 1e-3, 2.0), figure("psum 64 KiB", 2e-3, 0.9),
        figure("pmax 64 KiB", 3e-3, 1.5), figure("chain", 4e-3, 0.5),
        figure("ring, forward", 5e-3, 0.7, ONE),
        figure("ring, with gradients", 6e-3, 1.0, ONE),
        figure("ring, forward, sending nothing", 7e-3, 1.1, ONE),
        rows.Finding("b", "2 MiB", values={"bytes": 2.0}), rows.Finding("c", "agrees"),
    )  # fmt: skip
    assert [line for line in found if line and not line.startswith("| ---")] == [
        "| against `jax.lax` | 1 KiB | 64 KiB |",
        "| `psum` | 1 ms, 2.00 | 2 ms, *0.90* |",
        "| `pmax` |  | 3 ms, 1.50 |",
        "| case | against | forward | with gradients |",
        "| ring | one flash kernel / 2 | 5 ms, 0.70 | 6 ms, 1.00 |",
        "| ring, sending nothing | one flash kernel / 2 | 7 ms, 1.10 |  |",
        "| case | against | time, ratio |",
        "| chain | jax.lax | 4 ms, *0.50* |",
        "| case | found |",
        "| b | 2 MiB |",
    ]


def test_strategies_stand_beside_each_other_and_what_auto_takes():
    head, _, *found = lines(
        "strategies", figure("causal 8k, forward, ring", 4e-3, 0.5, ONE),
        figure("causal 8k, forward, ulysses", 2e-3, 1.0, ONE),
        figure("causal 8k, forward, auto", 4e-3, 0.5, "x", "auto takes ring, the y"),
        figure("causal 8k, with gradients, ring", 8e-3, 0.25, ONE),
        figure("2 documents, forward, documents ring", 1e-3, 0.3, ONE),
    )  # fmt: skip
    assert head == (
        '| case | one kernel / ranks | `ring` | `ulysses` | `"auto"` takes |'
    )
    assert found == [
        "| causal 8k | flash, 2 ms / 2 ms | 0.50 / 0.25 | 1.00 | `ring`: 0.50 |",
        "| 2 documents | flash, 300 us | 0.30 |  |  |",
    ]
