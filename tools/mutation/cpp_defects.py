"""Where one small edit of C++ makes a defect: on one line, or of two that follow.

The sources are formatted by clang-format, so blanks tell a comparison from a template.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator

from mutation.defects import Defect


@dataclasses.dataclass(frozen=True)
class _Edit:
    kind: str
    pattern: re.Pattern
    new: str | Callable[[re.Match], str]


_SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ",
    " != ": " == ", " && ": " || ", " || ": " && ", "std::min(": "std::max(",
    "std::max(": "std::min(", "true": "false", "false": "true",
    "S32": "U32", "U32": "S32", "F16": "BF16", "BF16": "F16", "F32": "F64",
    "memory_order_acquire": "memory_order_relaxed",
    "memory_order_release": "memory_order_relaxed",
    "notify_all": "notify_one",
}  # fmt: skip


def _swapped(match):
    return _SWAPS[match.group()]


def _any_of(*words):
    return re.compile("|".join(rf"\b{word}\b" for word in words))


_EDITS = (
    _Edit("comparison", re.compile(r" (?:<|<=|>|>=|==|!=) "), _swapped),
    _Edit("and, or", re.compile(r" (?:&&|\|\|) "), _swapped),
    _Edit("smaller, larger", re.compile(r"std::(?:min|max)\((?=.*,)"), _swapped),
    _Edit("truth value", _any_of("true", "false"), _swapped),
    _Edit("dtype", _any_of("S32", "U32", "F16", "BF16", "F32"), _swapped),
    _Edit("off by one", re.compile(r" [+-] 1\b"), ""),
    _Edit("error dropped", re.compile(r"^RETURN_IF_ERROR\((.*)\);$"), r"(void)(\1);"),
    _Edit(
        "error dropped",
        re.compile(r"^if \(.*\) return (?:\w+Error\(.*|status|\w+\.status\(\));$"),
        ";",
    ),
    _Edit("check removed", re.compile(r"^if \((?!constexpr).*\) return.*;$"), ";"),
    _Edit(
        "branch never taken",
        re.compile(r"(?<=^if \()(?!const|auto)[^;=]*(?=\) \{$)"),
        "false",
    ),
    _Edit("call removed", re.compile(r"^(?!return|delete|throw)[\w.>-]+\(.*\);$"), ";"),
    _Edit("assignment removed", re.compile(r"^[a-z][\w.>\[\]-]* [+|-]?= .*;$"), ";"),
    _Edit(
        "lock released early",
        re.compile(r"^(?:MutexLock|std::\w+_lock<.*>|Lock) lock\(.*\);$"),
        r"{ \g<0> }",
    ),
    _Edit(
        "fence weakened",
        _any_of("memory_order_acquire", "memory_order_release"),
        _swapped,
    ),
    _Edit("one is woken", _any_of("notify_all"), _swapped),
)  # fmt: skip
_NO_STATEMENT = "return|if|for|while|break|case|RETURN|ASSIGN|const|auto"
_STATEMENT = re.compile(rf"^(?!{_NO_STATEMENT})[\w.>-]+(?:\(.*\)| = .*);$")
_COMMENT = re.compile(r"//.*")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def of_file(root: pathlib.Path, path: pathlib.Path) -> Iterator[Defect]:
    """Return all defects of one file."""
    text = path.read_text()
    begin, before = 0, None
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = line.strip()
        start = begin + len(line) - len(line.lstrip())
        begin += len(line)

        def defect(kind, at, old, new, number=number, code=code):
            return Defect(
                str(path.relative_to(root)), number, number, at, at + len(old), old,
                new, code, kind,
            )  # fmt: skip

        if code.startswith(("//", "#", "static_assert", "template", "using")):
            before = None
            continue
        # Of the same length, so that places stay.
        bare = _TEXT.sub(lambda m: '"' + "_" * (len(m.group()) - 2) + '"', code)
        if _COMMENT.search(bare):
            bare = bare[: _COMMENT.search(bare).start()].rstrip()
        # Else the line is a part of a statement.
        is_whole = all(bare.count(a) == bare.count(b) for a, b in ("()", "{}", "[]"))
        for edit in _EDITS:
            for match in edit.pattern.finditer(bare):
                old = code[match.start() : match.end()]
                if old.endswith(";") and not is_whole:
                    continue
                # With its texts: a reference may be to what was blanked out.
                again = edit.pattern.search(code, match.start()) or match
                new = edit.new(match) if callable(edit.new) else again.expand(edit.new)
                yield defect(edit.kind, start + match.start(), old, new)
        indent = start - (begin - len(line))
        if is_whole and _STATEMENT.match(bare):
            # Two assignments may stand in any order.
            if before and before[1] == indent and "(" in before[0] + code:
                first, _, at = before
                between = text[at + len(first) : start]
                yield defect(
                    "order swapped", at, first + between + code, code + between + first
                )
            before = code, indent, start
        else:
            before = None
