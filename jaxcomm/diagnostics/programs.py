"""Which collectives a compiled program has, in which order, and from which lines.

A process that ``launch --watch`` starts writes this of each program it compiles, and
:mod:`jaxcomm.diagnostics.lines` looks up in it what NCCL was asked for. Everything here
may allow more orders of collectives than happen, never fewer.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxcomm import own_file
from jaxcomm.communicator import text_table as table

SUFFIX = ".programs"
MOST_BYTES = 1 << 20
MOST_TEXT = 1 << 26
_KINDS = {
    "all-reduce": "allred",
    "all-gather": "allgat",
    "reduce-scatter": "redsca",
    "collective-broadcast": "bcast",
    "all-to-all": "alltoal",
}
# How NCCL names what XLA hands over.
_DTYPES = {
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"},
    **{"c64": "float32", "c128": "float64"},
    **{f"s{bits}": f"int{bits}" for bits in (8, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 32, 64)},
}
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_COLLECTIVE = "|".join(_KINDS)
_INSTRUCTION = re.compile(
    rf"^ +(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?[)\]}}]) "
    rf"(?P<opcode>(?:{_COLLECTIVE})(?:-start)?|while|conditional|call|fusion"
    r"|fusion-start|async-start)\((?P<rest>.*)$"
)
_MODULE = re.compile(r"HloModule ([\w.\-<>]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<= ]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(\{\{[\d,{}]*\}\}|mesh\[[^\]]*\] \{[^}]*\}|\S+?), "
)
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)" source_line=(\d+)')
_FILE_NAME = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_STACK_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)")
_TABLES = {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A collective of a program.

    Attributes:
      name: of the instruction and the module, and the source line if that is known.
      kind: as NCCL's records have it, ``"allred"``.
      sizes: of its operands: (NCCL's dtype, elements, bytes).
      groups: the partitions that meet. None if unknown.
    """

    name: str
    kind: str
    sizes: tuple[tuple[str, int, int], ...]
    groups: tuple[tuple[int, ...], ...] | None


# A call; or ("seq" | "loop" | "maybe" | "either", parts).
Node = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a process compiled.

    Attributes:
      processes: of each partition.
      node: its collectives in their order.
    """

    processes: tuple[int, ...]
    node: Node


def parse(text: str) -> Node | None:
    """Return the collectives of the text of a compiled program; None if it has none.

    Args:
      text: as ``hlo_modules()[0].to_string()`` gives it, of JAX 0.10.2 to 0.12.
    """
    module = _MODULE.match(text)
    where, bodies, entry = _Sources(module[1] if module else "a program"), {}, ""
    body: list[re.Match] = []
    section = ""
    for line in text.splitlines():
        if line in _TABLES:
            section = line
        elif found := _COMPUTATION.match(line):
            section = ""
            body = bodies[found[2]] = []
            entry = found[2] if found[1] else entry
        elif section:
            where.add(section, line)
        elif found := _INSTRUCTION.match(line):
            body.append(found)
    partitions = re.search(r"\bnum_partitions=(\d+)", text[: text.find("\n")])
    count = int(partitions[1]) if partitions else 1
    return _body(entry, bodies, where, count, {}) if entry else None


def _body(name, bodies, where, partitions, known) -> Node | None:
    if name not in known:
        known[name] = None  # No computation calls itself.
        parts = [_node(each, bodies, where, partitions, known) for each in bodies[name]]
        known[name] = _of("seq", parts)
    return known[name]


def _of(how, parts) -> Node | None:
    parts = [part for part in parts if part is not None]
    return (how, *parts) if parts else None


def _node(found, bodies, where, partitions, known) -> Node | None:
    opcode, rest = found["opcode"], found["rest"]
    kind = _KINDS.get(opcode.removesuffix("-start"))
    if kind is not None:
        call = _call(found, kind, where, partitions)
        # NCCL may get neighbors as one, and in another order.
        node = ("loop", call) if len(call.sizes) > 1 else call
        # It tells nothing of what is empty. An all-to-all may be sends and receives.
        is_empty = any(elements == 0 for _, elements, _ in call.sizes)
        return ("maybe", node) if is_empty or kind == "alltoal" else node
    names = [
        name.strip().lstrip("%")
        for one, several in _CALLED.findall(rest)
        for name in (one or several).split(",")
    ]
    called = [name for name in names if name in bodies]
    parts = [_body(name, bodies, where, partitions, known) for name in called]
    inner = _of("either" if opcode == "conditional" else "seq", parts)
    if inner is None:
        return None
    if opcode == "while":
        return "maybe", ("loop", inner)
    # XLA has a kernel of its own for some fusions, and graphs call NCCL once.
    may_bypass = opcode.startswith("fusion") or any(
        "command_buffer" in n for n in names
    )
    if opcode == "async-start" and len(_calls(inner)) > 1:
        return "loop", ("either", *_calls(inner))
    return ("maybe", inner) if may_bypass or opcode == "conditional" else inner


def _calls(node) -> list[Call]:
    if isinstance(node, Call):
        return [node]
    return [call for part in node[1:] for call in _calls(part)]


def _call(found, kind, where, partitions) -> Call:
    groups = _groups(found["rest"], partitions)
    shapes = _SHAPE.findall(found["type"])
    # An asynchronous one returns what it was handed, too.
    has_operands = found["type"].startswith("((") or (
        found["opcode"] == "all-gather-start"
    )
    shapes = shapes[len(shapes) // 2 :] if has_operands else shapes
    sizes = []
    for dtype, dimensions in shapes:
        count = math.prod(int(re.sub(r"\D", "", d)) for d in dimensions.split(",") if d)
        if kind == "allgat":
            # Handed in, of what comes out.
            count //= len(groups[0]) if groups else 1
        bits = _BITS.get(dtype) or int(re.sub(r"^\D+|\D.*$", "", dtype) or 8)
        elements = 2 * count if dtype in ("c64", "c128") else count
        sizes.append((_DTYPES.get(dtype, ""), elements, count * bits // 8))
    # How many bytes a group of unknown size hands in is unknown, too.
    known = kind != "alltoal" and (groups is not None or kind != "allgat")
    at = where.of(found["rest"])
    return Call(
        name=table.plain(
            f"{found['name']} of {where.module}" + (f", {at}" if at else "")
        ),
        kind=kind,
        sizes=tuple(sizes) if known else (),
        groups=groups,
    )


def _groups(rest, partitions):
    found = _GROUPS.search(rest)
    if found is None:
        return None
    text = found[1]
    if text == "{}":
        return (tuple(range(partitions)),)
    if text.startswith("{{"):
        return tuple(
            tuple(int(each) for each in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", text)
        )
    iota = re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        sizes = [int(each) for each in iota[3].split(",")]
        order = [int(each) for each in (iota[4] or "").split(",") if each]
        ids = _transposed(sizes, order or range(len(sizes)))
        width = int(iota[2])
        return tuple(tuple(ids[i : i + width]) for i in range(0, len(ids), width))
    mesh = re.fullmatch(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',?\s?)+)\}", text)
    if mesh:
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        chosen = re.findall(r"'(\w+)'", mesh[2])
        names = [*(axis for axis in axes if axis not in chosen), *chosen]
        order = [list(axes).index(axis) for axis in names]
        ids = _transposed([int(size) for size in axes.values()], order)
        width = math.prod(int(axes[axis]) for axis in chosen)
        return tuple(tuple(ids[i : i + width]) for i in range(0, len(ids), width))
    return None


def _transposed(sizes, order) -> list[int]:
    """Return the numbers of an array of these sizes, its dimensions in an order."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return [
        sum(index * strides[axis] for index, axis in zip(place, order, strict=True))
        for place in itertools.product(*(range(sizes[axis]) for axis in order))
    ]


class _Sources:
    """The tables of files, lines and frames at the head of a program's text."""

    def __init__(self, module):
        self.module = module
        self._files, self._lines, self._frames = {}, {}, {}

    def add(self, section, line):
        if section == "FileNames" and (found := _FILE_NAME.match(line)):
            self._files[found[1]] = found[2]
        elif section == "FileLocations" and (found := _LOCATION.match(line)):
            self._lines[found[1]] = found[2], found[3]
        elif section == "StackFrames" and (found := _STACK_FRAME.match(line)):
            self._frames[found[1]] = found[2]

    def of(self, rest) -> str:
        """Return ``"train.py:88"``; empty if the program does not tell."""
        if found := _SOURCE.search(rest):
            file, line = found[1], found[2]
        elif found := _FRAME.search(rest):
            location = self._lines.get(self._frames.get(found[1]), ("", ""))
            file, line = self._files.get(location[0], ""), location[1]
        else:
            return ""
        return f"{os.path.basename(file)}:{line}" if file else ""


def to_json(node: Node, processes: Sequence[int], note: str = "") -> str:
    """Return a line of a file of programs.

    Args:
      node: as :func:`parse` returns it.
      processes: of each partition.
      note: what to say with each source line.
    """

    def listed(node):
        if isinstance(node, Call):
            return {**dataclasses.asdict(node), "name": node.name + note}
        return [node[0], *map(listed, node[1:])]

    return json.dumps({"processes": list(processes), "node": listed(node)})


def beside(ring: str | os.PathLike, pid: int) -> list[Program] | None:
    """Read what a process compiled; None if not all of that is known.

    Args:
      ring: path of the record of what NCCL does for it.
      pid: of the process. A file of another is left alone.
    """
    path = os.path.splitext(ring)[0] + SUFFIX
    try:
        head, *lines = own_file.read(path, MOST_BYTES).decode().splitlines()
        if json.loads(head) != {"pid": pid}:
            return None
        return [_program(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _program(document) -> Program:
    def node(given):
        if isinstance(given, list):
            how, *parts = given
            if how not in ("seq", "loop", "maybe", "either"):
                raise ValueError(how)
            return (how, *map(node, parts))
        groups = given["groups"]
        return Call(
            name=table.plain(str(given["name"])),
            kind=str(given["kind"]),
            sizes=tuple((str(d), int(n), int(b)) for d, n, b in given["sizes"]),
            groups=None
            if groups is None
            else tuple(tuple(map(int, group)) for group in groups),
        )

    processes = tuple(int(each) for each in document["processes"])
    return Program(processes=processes, node=node(document["node"]))


def head(pid: int) -> str:
    """Return the first line of the file of a process."""
    return json.dumps({"pid": pid})
