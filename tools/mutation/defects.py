"""Where one small edit makes a defect, and what the edit is."""

import ast
import builtins
import copy
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator

_COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip
# What messages say, and types, are for tests of another kind.
_PASSED_OVER = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)


@dataclasses.dataclass(frozen=True)
class Defect:
    """One edit of one file.

    Attributes:
      file: the path, from the root of the repository.
      line: the first line that changes, counted from 1.
      shown_at: the line that a test must execute to notice: where a branch begins.
      begin, end: where the text that is replaced stands in the file, in characters.
      old: that text.
      new: what replaces it.
      source: the whole first line, without indentation.
      kind: what sort of edit it is.
    """

    file: str
    line: int
    shown_at: int
    begin: int
    end: int
    old: str
    new: str
    source: str
    kind: str

    @property
    def name(self) -> str:
        """Name the edit, wherever the line stands."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {self.source}: {old} -> {new}"

    def applied_to(self, text: str) -> str:
        """Return the text of the file with the defect."""
        return text[: self.begin] + self.new + text[self.end :]


def draw(root: pathlib.Path, folders: list[str], count: int, seed: int) -> list[Defect]:
    """Draw defects of all Python files below some folders.

    Each edit draws its own number. So a change to the code replaces only the defects of
    the lines that changed.
    """
    found = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for defect in of_file(root, path):
                found.setdefault(defect.name, defect)
    return sorted(found.values(), key=lambda each: numbered(each, seed))[:count]


def numbered(defect: Defect, seed: int) -> bytes:
    """Return the number that a defect draws."""
    return hashlib.sha256(f"{seed} {defect.name}".encode()).digest()


def of_file(root: pathlib.Path, path: pathlib.Path) -> Iterator[Defect]:
    """Return all defects of one file."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line, column):
        # ast counts columns in bytes.
        row = text[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(row.encode()[:column].decode())

    for kind, node, new, shown_at in _edits(ast.parse(text)):
        begin = place(node.lineno, node.col_offset)
        end = place(node.end_lineno, node.end_col_offset)
        yield Defect(
            file=str(path.relative_to(root)),
            line=node.lineno,
            shown_at=shown_at,
            begin=begin,
            end=end,
            old=text[begin:end],
            new=new,
            source=text.splitlines()[node.lineno - 1].strip(),
            kind=kind,
        )


def _edits(tree: ast.AST) -> Iterator[tuple[str, ast.AST, str, int]]:
    for node in _code(tree):
        if isinstance(node, ast.If):
            only_raises = all(isinstance(each, ast.Raise) for each in node.body)
            kind = "check removed" if only_raises else "branch never taken"
            yield kind, node.test, "False", node.body[0].lineno
        for kind, changed, new in _edits_of(node):
            yield kind, changed, new, changed.lineno


def _edits_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        other = copy.deepcopy(node)
        other.ops[0] = _COMPARISONS[type(node.ops[0])]()
        yield "comparison", node, _text(other)
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", node, _text(other)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        other = copy.deepcopy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield "operator", node, _text(other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, _text(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "truth value", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "off by one", node, str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        other = copy.deepcopy(node)
        other.body, other.orelse = node.orelse, node.body
        yield "branches swapped", node, _text(other)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement removed", node, "pass"


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST, str]]:
    # Of Python's own functions some would merely raise.
    obvious = isinstance(node.func, ast.Name) and node.func.id in dir(builtins)
    plain = not any(isinstance(each, ast.Starred) for each in node.args[:2])
    if len(node.args) >= 2 and plain and not obvious:
        other = copy.deepcopy(node)
        other.args[:2] = node.args[1], node.args[0]
        yield "arguments swapped", node, _text(other)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg and isinstance(keyword.value, (ast.Name, ast.Attribute)):
            other = copy.deepcopy(node)
            del other.keywords[i]
            yield "argument left out", node, _text(other)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that say what is done."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not _is_passed_over(child):
                yield child
                yield from _code(child)


def _is_passed_over(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        # The name of a type: X = Y | None
        return isinstance(node.value, ast.BinOp) and isinstance(
            node.value.op, ast.BitOr
        )
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.keyword):
        # zip(..., strict=True) says what holds anyway.
        return node.arg == "strict"
    return isinstance(node, _PASSED_OVER)


def _text(node: ast.AST) -> str:
    # In brackets: what stands around it may bind more tightly.
    return f"({ast.unparse(node)})"
