"""What NCCL was asked for, found in compiled programs: never another line.

The texts in ``compiled/`` are of XLA's compiler for H100 (0.10.2, 0.12.0.1) and of two
H200s (0.11.2), without what no test reads. ``SEEN`` is what NCCL was asked for there.
"""

import os
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P

from jaxcomm.diagnostics import lines, programs
from jaxcomm.diagnostics.lines import Asked
from jaxcomm.diagnostics.programs import Call, Program
from jaxcomm.launch import compiled

FOLDER = pathlib.Path(__file__).parent / "compiled"
VERSIONS = ("0.10.2", "0.11.2", "0.12.0.1")
BYTES = {"int8": 1, "bfloat16": 2, "float32": 4}


def of_version(version):
    """Returns programs of a version, by name, as they come back from a file."""
    parts = re.split(r"^==== ", (FOLDER / f"{version}.txt").read_text(), flags=re.M)
    found = {}
    for part in parts[1:]:
        name, _, text = part.partition("\n")
        if node := programs.parse(text):
            found[name] = Program(processes=(0, 1), node=node)
    return found


def asked(kind, dtype, count, number=0):
    size = count * BYTES.get(dtype, 1)
    return Asked(number=number, kind=kind, dtype=dtype, count=count, bytes=size)


def numbered(several, first=1):
    return [
        asked(each.kind, each.dtype, each.count, number)
        for number, each in enumerate(several, first)
    ]


def named(compiled_programs, operations, skips=False):
    return lines.of_operations(
        list(compiled_programs), {0, 1}, 2, operations, skips=skips
    )


LAMBDA = "of jit__lambda, spike.py:"
SUM = f"psum.7.2 {LAMBDA}"
SEEN = [
    *[(asked("allred", "float32", 256), f"{SUM}73")] * 2,
    *[(asked("allred", "float32", 1 << 22), f"{SUM}74")] * 2,
    *[(asked("allgat", "int8", 4096), f"all_gather.3.2 {LAMBDA}75")] * 2,
    *[(asked("redsca", "float32", 512), f"reduce_scatter.7.2 {LAMBDA}76")] * 2,
    *[(asked("allred", "float32", 512), "psum.6.2 of jit_three, spike.py:64")] * 6,
]  # fmt: skip


def test_what_two_gpus_ran_is_found():
    operations = numbered(each for each, _ in SEEN)
    found = named(of_version("0.11.2").values(), operations)
    assert [found[each.number] for each in operations] == [name for _, name in SEEN]


@pytest.mark.parametrize(
    ("version", "third"),
    [
        ("0.10.2", "all-reduce-start.2 of jit_chain, a.py:16"),
        ("0.12.0.1", "psum.23.2 of jit_chain, a.py:16"),
    ],
)
def test_equal_collectives_are_told_apart_by_their_order(version, third):
    chain = of_version(version)["chain"]
    sums = [asked("allred", "float32", 256)] * 6
    found = named([chain], numbered(sums))
    assert found[3] == found[6] == third
    assert len({found[n] for n in range(1, 4)}) == 3
    # Of a ring that has lost its beginning, any may be the last.
    found = named([chain], numbered(sums, first=100))
    assert found[105].startswith("one of ")
    assert found[105].count(" of jit_chain") == 3
    # The gap is where nobody knows.
    operations = numbered(sums)
    found = named([chain], operations[:3] + operations[4:])
    assert found[3] == third
    assert found[5].startswith("one of ")
    # And if another communicator may have had some of them.
    assert named([chain], numbered(sums), skips=True)[3].startswith("one of ")


@pytest.mark.parametrize(
    ("version", "forward", "backward"),
    [
        (
            "0.10.2",
            "all-gather-start of jit_scanned, a.py:40",
            ["all-gather-start.1 of jit_scanned, a.py:40",
             "reduce-scatter-start of jit_scanned"],
        ),
        (
            "0.12.0.1",
            "all-gather.4 of jit_scanned, a.py:41",
            ["reduce-scatter-start of jit_scanned, a.py:40",
             "all-gather.1.2 of jit_scanned, a.py:41"],
        ),
    ],
)  # fmt: skip
def test_loops_run_several_times(version, forward, backward):
    gather = asked("allgat", "int8", 131072)
    scatter = asked("redsca", "float32", 32768)
    turn = [scatter if "scatter" in name else gather for name in backward]
    found = named([of_version(version)["fsdp_scan"]], numbered([gather] * 4 + turn * 4))
    # Without other programs to come before or after, each place is the only one.
    assert [found[n] for n in range(1, 4)] == [forward] * 3
    assert [found[n] for n in range(6, 13)] == (backward * 4)[1:]


def executed(node, choose):
    """Yields the collectives of one run, and what NCCL calls them."""
    if isinstance(node, Call):
        kind = node.kind
        for dtype, count, size in node.sizes:
            given = ("int8", size) if kind == "allgat" else (dtype, count)
            yield node.name, asked(kind, *given)
        return
    how, *parts = node
    if how == "either":
        parts = [choose.choice(parts)]
    times = {"maybe": choose.randint(0, 1), "loop": choose.randint(1, 4)}.get(how, 1)
    if how == "loop" and isinstance(parts[0], Call):
        times = 1  # its operands
    for _ in range(times):
        for part in parts:
            yield from executed(part, choose)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_line_is_claimed_that_is_not_so(version):
    choose = random.Random(version)
    known = [*of_version(version).values()]
    claims = 0
    for _ in range(60):
        some = choose.sample(known, choose.randint(1, len(known)))
        ran = []
        for program in choose.choices(some, k=12):
            ran += executed(program.node, choose)
        first = choose.choice([1, 50])
        operations = numbered([each for _, each in ran], first)
        skips = choose.random() < 0.2
        found = named(some, operations, skips)
        assert found or skips or not operations
        for operation, (name, _) in zip(operations, ran, strict=True):
            claim = found.get(operation.number, name)
            if claim.startswith("one of "):
                assert name in claim
            else:
                assert claim == name
                claims += operation.number in found
    assert claims > 300


def test_where_a_program_is_missing_nothing_is_said():
    known = of_version("0.10.2")
    sums = [asked("allred", "float32", 256)] * 3
    operations = numbered([*sums, asked("allred", "float32", 999), *sums])
    assert named([known["chain"]], operations) == {}
    assert named([], numbered(sums)) == {}


def test_where_each_of_many_may_be_skipped_nothing_is_said():
    call = Call(name="a", kind="allred", sizes=(("float32", 4, 16),), groups=None)
    program = Program(processes=(0, 1), node=("seq", *[call] * 5000))
    sums = numbered([asked("allred", "float32", 4)] * 20)
    assert named([program], sums, skips=True) == {}
    assert named([program], sums)[20] == "a"


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '{"processes": [0], "node": ["twice"]}',
        '{"processes": [0], "node": ' + "[" * 5000,
        '{"processes": [0], "node": ' + '["seq", ' * 900 + "[]" + "]" * 900 + "}",
        '{"processes": [0], "node": {"name": 1, "kind": 2, "sizes": 3, "groups": 4}}',
        '{"processes": [0], "node": {"name": "a", "kind": "b", "sizes": [], '
        '"groups": [["a"]]}}',
    ],
)
def test_a_damaged_file_of_programs_is_left_alone(line, tmp_path):
    path = tmp_path / "nccl-0.programs"
    path.write_text(f"{programs.head(7)}\n{line}\n")
    assert programs.beside(tmp_path / "nccl-0.ring", 7) is None
    path.write_text(line)
    assert programs.beside(tmp_path / "nccl-0.ring", 7) is None


def grouped(text, partitions=8):
    line = (
        f"  %a = f32[4]{{0}} all-reduce(%b), channel_id=1, replica_groups={text}, x=1\n"
    )
    head = f"HloModule m, num_partitions={partitions}\n\n"
    entry = "ENTRY %e (b: f32[4]) -> f32[4] {\n"
    return programs.parse(f"{head}{entry}{line}}}\n")[1].groups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,4]<=[8]", np.arange(8).reshape(2, 4)),
        ("[4,2]<=[2,4]T(1,0)", np.arange(8).reshape(2, 4).T.reshape(4, 2)),
        ("mesh['x'=2,'y'=4] {'y'}", np.arange(8).reshape(2, 4)),
        ("mesh['x'=2,'y'=4] {'x'}", np.arange(8).reshape(2, 4).T),
        ("mesh['x'=2,'y'=2,'z'=2] {'x','z'}",
         np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)),
        ("{}", [range(8)]),
        ("mesh['x'=8] {'x':(1)2}", None),
        ("mesh['x'=8, device_ids=([8]<=[2,4]T(1,0))] {'x'}", None),
    ],
)  # fmt: skip
def test_groups_are_read_in_all_forms(text, expected):
    found = grouped(text)
    if expected is None:
        assert found is None
    else:
        assert sorted(map(sorted, found)) == sorted(
            sorted(map(int, g)) for g in expected
        )


def test_communicators_are_told_apart_by_their_processes():
    along = {
        axis: Call(name=axis, kind="allred", sizes=(("float32", 4, 16),), groups=groups)
        for axis, groups in {
            "x": ((0, 2), (1, 3)), "y": ((0, 1), (2, 3)), "?": None,
        }.items()
    }  # fmt: skip
    node = ("seq", *along.values())
    # Partitions are on processes in an order of their own.
    program = Program(processes=(0, 1, 3, 2), node=node)
    one = [asked("allred", "float32", 4, 1)]
    found = {
        members: lines.of_operations([program], members, 2, one, skips=False)
        for members in (frozenset({0, 1}), frozenset({0, 3}), frozenset({0, 2}))
    }
    assert [each[1] for each in found.values()] == ["y", "x", "?"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Returns the file of this process, while it keeps what it compiles."""
    for module, name in (
        (compiler, "compile_or_get_cached"),
        (serialize_executable, "deserialize_and_load"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    path = tmp_path / "folder" / "nccl-0.programs"
    path.parent.mkdir()
    file = compiled.Compiled(path)
    file.keep()
    yield path
    jax.monitoring.unregister_event_listener(file._count)


def total(size):
    """Compiles a sum of arrays of this size, whose line is the second below."""

    def summed(x):
        return jax.lax.psum(x, "x")

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.ones((2, size)), rows)
    f = jax.shard_map(summed, mesh=mesh, in_specs=P("x"), out_specs=P())
    return jax.jit(f).lower(x).compile()


def test_a_process_writes_what_it_compiles(path):
    total(7)
    record = path.with_suffix(".ring")
    (program,) = programs.beside(record, os.getpid())
    assert program.processes == (0, 0)
    (call,) = programs._calls(program.node)
    line = total.__code__.co_firstlineno + 4
    name = call.name.removesuffix(" when it was compiled")
    assert name.endswith(f" of jit_summed, test_lines.py:{line}")
    assert call.sizes == (("float32", 7, 28),)
    # A file of an earlier process is of no use, nor one that is not whole.
    assert programs.beside(record, os.getpid() + 1) is None
    path.write_text(path.read_text()[:-20])
    assert programs.beside(record, os.getpid()) is None


@pytest.mark.parametrize("why", ["too much", "no folder", "another process's"])
def test_a_process_that_cannot_write_all_leaves_no_file(path, monkeypatch, why):
    program = total(7)
    if why == "too much":
        monkeypatch.setattr(programs, "MOST_BYTES", path.stat().st_size + 20)
        total(9)
    elif why == "no folder":
        path.unlink()
        path.parent.rmdir()
        total(9)
        path.parent.mkdir()
    else:
        given = serialize_executable.serialize(program)
        serialize_executable.deserialize_and_load(*given)
    # Others would be taken for what is missing.
    assert not path.exists()
    total(11)
    assert not path.exists()
