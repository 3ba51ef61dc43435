"""The first difference of two runs, by records that are written by hand."""

import json

import pytest
from checksums_by_hand import site_of, write

import jaxcomm
from jaxcomm.diagnostics.checksum_files import load

BOTH = [(0, 0, "a", "c"), (0, 1, "b", "c")]


@pytest.mark.parametrize(
    ("entries", "changes", "message"),
    [
        (BOTH, {"dropped": 1}, "step 0: 1 more calls than the 1048576 that are kept"),
        (BOTH[:1], {}, "psum over .* of jit_f: 1 of 2 ranks"),
        (BOTH + BOTH[:1], {}, "ended 2 times on some devices and 1 times on others"),
        (BOTH, {"processes": 2}, r"nothing from processes \[1\] of 2"),
        (BOTH, {"version": 2}, "line 1: not checksums of jaxcomm: .*version 2"),
        ([(1, 0, "a", "c")], {}, "line 1: not checksums of jaxcomm"),
        (BOTH, {"sites": [{}]}, "line 1: not checksums of jaxcomm"),
        (BOTH, {"step": 1}, r"one of the runs alone has steps \[0, 1\]"),
        ([], {"unrecorded": ["psum: left"]}, "nothing can be compared: psum: left"),
    ],
)
def test_records_that_lack_something_are_refused(tmp_path, entries, changes, message):
    whole = write(tmp_path / "whole", [] if "unrecorded" in changes else BOTH)
    lacks = write(tmp_path / "lacks", entries, **changes)
    for pair in ((whole, lacks), (lacks, whole)):
        with pytest.raises(ValueError, match=message):
            jaxcomm.checksums.compare(*pair)


def test_a_run_that_is_not_there_or_was_cut_is_refused(tmp_path):
    whole = write(tmp_path / "whole", BOTH)
    with pytest.raises(ValueError, match="no checksums of a run are there"):
        jaxcomm.checksums.compare(whole, tmp_path / "none")
    write(whole, BOTH)
    with pytest.raises(ValueError, match="line 2: its step was saved before"):
        load(whole)
    # A program that was started again, from the second of three steps.
    again = tmp_path / "again"
    for step, start, sums in (
        (0, "1", "x"),
        (1, "1", "y"),
        (2, "1", "z"),
        (1, "2", "w"),
    ):
        write(again, [(0, at, sums, "c") for at in (0, 1)], step=step, start=start)
    found = load(again).steps
    assert {step: {e.operands for e in found[step]} for step in found} == {
        0: {("x",)},
        1: {("w",)},
    }
    mixed = write(tmp_path / "mixed", BOTH)
    of_two = json.loads((mixed / "checksums-0.jsonl").read_text())
    of_two |= {"process": 1, "processes": 2}
    (mixed / "checksums-1.jsonl").write_text(json.dumps(of_two))
    with pytest.raises(ValueError, match=r"written by runs of \[1, 2\] processes"):
        load(mixed)
    cut = write(tmp_path / "cut", BOTH) / "checksums-0.jsonl"
    cut.write_text(cut.read_text()[:-20])
    with pytest.raises(ValueError, match="line 1: not checksums of jaxcomm"):
        load(cut.parent)


def test_runs_on_one_mesh_are_compared_in_all_they_have(tmp_path):
    whole = write(tmp_path / "whole", BOTH)
    two = [site_of(), site_of("all_to_all")]
    twice = [(0, 0, "a", "c"), (0, 1, "b", "c")]
    for name, entries, sites, said in (
        ("operand", [(0, 0, "a", "c"), (0, 1, "x", "c")], None,
         "psum over ('i',) number 0 of jit_f: operands differ on {'i': 1}"),
        ("result", [(0, 0, "a", "x"), (0, 1, "b", "c")], None,
         "psum over ('i',) number 0 of jit_f: results differ on {'i': 0}"),
        ("shape", BOTH, [site_of(operands=("float32[5]",))],
         "psum over ('i',) number 0 of jit_f: calls differ"),
        ("more", [*BOTH, (1, 0, "a", "c"), (1, 1, "a", "c")], two,
         "all_to_all over ('i',) number 0 of jit_f: calls differ"),
        ("twice", BOTH + twice, None,
         "psum over ('i',) number 0 of jit_f, turn 1: calls differ"),
    ):  # fmt: skip
        other = write(tmp_path / name, entries, sites)
        for pair in ((whole, other), (other, whole)):
            assert str(jaxcomm.checksums.compare(*pair)) == f"step 0, {said}"


# What two runs of two steps called: the meshes of psum ("2", "4"), and of another
# program's ("e"), in either step; and the verdict. Meshes differ in size.
PAIRS = {
    "equal": ("2 2", "2 2", "all 2 calls"),
    "nothing in the second step": ("2 2", "2 -", "step 1, {psum}: calls differ"),
    "nothing at all": ("2 2", "- -", "step 0, {psum}: calls differ"),
    "a mesh more, equal": ("2,e2 2", "2,e2 2", "all 3 calls"),
    "a mesh more in one": ("2 2", "2,e4 2", "not compared: {eval}: one run alone"),
    "a mesh more that both have": ("2 2,e4", "2,e4 2,e4", "step 0, {eval}: calls diff"),
    "two sizes": ("2 2", "4 4", "all 2 calls"),
    "two sizes, one evaluates": ("2,e2 2", "4 4", "not compared: {eval}: one run alo"),
    "two sizes, evaluated on one": (
        "2,e2 2,e2",
        "4,e2 4",
        "step 1, {eval}: calls diff",
    ),
    "two sizes of one program": ("2,4 2", "2,4 2", "all 3 calls"),
    "two sizes, in one alone": ("2,4 2,4", "2,4 2", "step 1, {psum}: calls differ"),
    "three sizes": ("2,4 2", "8 8", "not compared: {psum}: called over several me"),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_each_call_is_compared_by_its_own_mesh(tmp_path, pair):
    *runs, said = pair
    for name, calls in zip("ab", runs, strict=True):
        for step, of_step in enumerate(calls.split()):
            sites, entries = [], []
            for call in of_step.replace("-", "").split(",") if of_step != "-" else ():
                ranks, number = int(call[-1]), len(sites)
                program = "jit_eval" if call[0] == "e" else "jit_f"
                sites.append(site_of(ranks=ranks, program=program))
                entries += [(number, at, f"{at}", "c") for at in range(ranks)]
            write(tmp_path / name, entries, sites, step=step)
    places = {"psum": "psum over ('i',) number 0 of jit_f"}
    places["eval"] = places["psum"].replace("_f", "_eval")
    for pair in ("ab", "ba"):
        text = str(jaxcomm.checksums.compare(*(tmp_path / name for name in pair)))
        assert said.format(**places) in text


def test_what_a_run_could_not_record_is_no_difference(tmp_path):
    sites = [site_of(), site_of("all_to_all")]
    both = write(tmp_path / "both", [*BOTH, (1, 0, "a", "c"), (1, 1, "a", "c")], sites)
    why = "all_to_all over ('i',): JAX calls no host from this platform"
    one = write(tmp_path / "one", BOTH, unrecorded=[why])
    found = jaxcomm.checksums.compare(both, one)
    assert (found.first, found.compared) == (None, 1)
    assert "one of the runs did not record it" in found.skipped[1]


def test_runs_on_meshes_of_two_sizes_are_compared_in_what_ranks_share(tmp_path):
    two = write(tmp_path / "two", BOTH)
    four = [(0, rank, f"{rank}", "c") for rank in range(4)]
    same = write(tmp_path / "same", four, [site_of(ranks=4)])
    assert str(jaxcomm.checksums.compare(two, same)) == (
        "all 1 calls that were compared are equal"
    )
    # Also if one rank alone has another result.
    odd = write(tmp_path / "odd", [*four[:3], (0, 3, "3", "x")], [site_of(ranks=4)])
    found = jaxcomm.checksums.compare(two, odd)
    assert (found.first.what, found.first.rank) == ("results", None)
    psum = "psum over ('i',) number 0 of jit_f"
    for name, entries, sites, said in (
        ("own", four, [site_of("all_to_all", 4)], None),
        ("shape", four, [site_of(ranks=4, results=("float32[2]",))],
         f"{psum}: results are ('float32[4]',) and ('float32[2]',)"),
        ("often", four + four, [site_of(ranks=4)],
         f"{psum}: called 1 and 2 times in a step"),
    ):  # fmt: skip
        other = write(tmp_path / name, entries, sites)
        with pytest.raises(ValueError, match="nothing can be compared") as caught:
            jaxcomm.checksums.compare(two, other)
        assert said is None or said in str(caught.value)
    # Along an axis that the call does not name, devices are told apart.
    mesh = {"mesh": {"j": 2, "i": 2}}
    of_group = [(0, [j, i], "a", f"{j}") for j in range(2) for i in range(2)]
    one = write(tmp_path / "2x2", of_group, [site_of() | mesh])
    mesh = {"mesh": {"j": 2, "i": 1}}
    alone = [(0, [j, 0], "a", f"{j}") for j in range(2)]
    other = write(tmp_path / "2x1", alone, [site_of() | mesh])
    assert jaxcomm.checksums.compare(one, other).first is None
    mesh = {"mesh": {"j": 1, "i": 2}}
    third = write(tmp_path / "1x2", of_group[:2], [site_of() | mesh])
    with pytest.raises(ValueError, match="differ in size along other axes"):
        jaxcomm.checksums.compare(one, third)
