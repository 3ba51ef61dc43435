"""The public names and their signatures: what users may depend on.

They are pinned in ``public_api.txt``. ``python tests/test_public_api.py`` prints them.
"""

import importlib
import inspect
import pathlib
import re

import jax
import pytest

import jaxcomm
from jaxcomm import renamed
from jaxcomm.attention.strategies.strategy import Strategy

PINNED = pathlib.Path(__file__).with_name("public_api.txt")
# What users make themselves; of other classes they get objects.
MADE_BY_USERS = {"CommPolicy", "Machine", "SymmetricPool"}
# JAX 0.12 has psum_scatter_start, of the same arguments; the others may follow.
TWINS = [
    name
    for name in jaxcomm.__all__
    if hasattr(jax.lax, name) and not name.endswith("_start")
]


def plain(function) -> str:
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _is_method(value):
    # Python takes a cached property for one.
    return inspect.isroutine(value) and callable(value)


def described(module=jaxcomm, prefix="") -> str:
    lines = []
    for name in sorted(module.__all__):
        found, name = getattr(module, name), prefix + name
        if inspect.ismodule(found):
            lines += [described(found, f"{name}.").rstrip()]
            continue
        if not inspect.isclass(found):
            lines.append(f"{name}{plain(found)}")
            continue
        lines.append(f"class {name}{plain(found) if name in MADE_BY_USERS else ''}")
        for member, value in inspect.getmembers(found) if not prefix else ():
            own = any(member in vars(c) for c in found.__mro__ if c.__module__ != "abc")
            if member.startswith("_") or not own or issubclass(found, Exception):
                continue
            if name in MADE_BY_USERS and not callable(value):
                continue
            text = plain(value) if _is_method(value) else ""
            lines.append(f"    {member}{text}")
    return "\n".join(lines) + "\n"


def test_names_and_signatures_are_the_pinned_ones():
    assert described() == PINNED.read_text(), (
        "the public API changed. If it is meant to: python tests/test_public_api.py "
        "> tests/public_api.txt, and a line in CHANGELOG.md"
    )


def test_inner_names_do_not_show():
    assert set(dir(jaxcomm)) == {*jaxcomm.__all__, "__version__"}
    assert list(jaxcomm.__all__) == sorted(jaxcomm.__all__)


def _is_annotated(function):
    signature = inspect.signature(function)
    found = [signature.return_annotation]
    for i, (name, parameter) in enumerate(signature.parameters.items()):
        if i or name not in ("self", "cls"):
            found.append(parameter.annotation)
    return inspect.Parameter.empty not in found


def _everything(module=jaxcomm):
    for name in module.__all__:
        found = getattr(module, name)
        yield from _everything(found) if inspect.ismodule(found) else [found]


@pytest.mark.parametrize("found", list(_everything()), ids=lambda found: found.__name__)
def test_everything_public_has_types_and_words(found):
    """The functions, and the methods of classes, those in namespaces included."""
    assert inspect.getdoc(found)
    functions = [found]
    if inspect.isclass(found):
        public = [getattr(found, name) for name in vars(found) if name[0] != "_"]
        # Who writes a strategy fills in methods that ``Strategy`` annotates.
        is_filled_in = issubclass(found, Strategy)
        functions = [] if is_filled_in else filter(_is_method, public)
    assert [each for each in functions if not _is_annotated(each)] == []


@pytest.mark.parametrize("name", sorted(renamed.NAMES))
def test_an_old_name_says_the_new_one(name):
    module, _, old = name.rpartition(".")
    meant = f"^{name} is {re.escape(renamed.NAMES[name])} now$"
    with pytest.raises(AttributeError, match=meant) as caught:
        getattr(importlib.import_module(module), old)
    assert caught.value.name == old
    # What it says is there, if it is a name.
    new = renamed.NAMES[name].partition(",")[0]
    if re.fullmatch(r"(jaxcomm|jax\.lax)[\w.]*", new):
        parent, _, last = new.rpartition(".")
        assert hasattr(importlib.import_module(parent), last)


def test_a_name_of_torch_or_mpi4jax_says_ours():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "coming-from.md").read_text()
    for name, here in renamed.ELSEWHERE.items():
        for module in jaxcomm, jaxcomm.attention:
            with pytest.raises(AttributeError, match=f"'{name}'. See {here}$"):
                getattr(module, name)
        parent, _, last = here.rpartition(".")
        assert hasattr(importlib.import_module(parent), last)
        assert f"`{last}" in page or f"`{here}" in page


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_takes_what_jax_lax_takes(name):
    """Under the same names, in the same order, with the same defaults."""

    def said(library):
        parameters = inspect.signature(getattr(library, name)).parameters.values()
        found = [(p.name, p.kind, p.default) for p in parameters]
        # Of parameters by name the order says nothing.
        by_name = [p for p in found if p[1] is inspect.Parameter.KEYWORD_ONLY]
        own = "lane", "backend", "reproducible"
        ours = [p for p in by_name if p[0] not in own]
        return [p for p in found if p not in by_name], sorted(ours, key=str)

    assert said(jaxcomm) == said(jax.lax)


if __name__ == "__main__":
    print(described(), end="")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: jaxcomm.dot_product_attention(1, 2, 3, is_causal=True),  # pyright: ignore
            "dot_product_attention: sharding= is missing. Pass sharding=jax.P(batch, ",
        ),
        (
            lambda: jaxcomm.ring_attention(1, 2, 3, "context"),  # pyright: ignore
            "ring_attention: tokens= is missing. Pass the tokens of this rank, which ",
        ),
        (
            lambda: jaxcomm.using("gloo"),  # pyright: ignore
            "using: too many positional arguments. Pass some of backend=, lane=, r",
        ),
        (
            lambda: jaxcomm.CommPolicy(timeout=30),  # pyright: ignore
            "CommPolicy: timeout= is no argument. Pass JAXCOMM_TIMEOUT=seconds in the ",
        ),
        (
            lambda: jaxcomm.CommPolicy(channels=3),  # pyright: ignore
            "CommPolicy: channels= is no argument. Pass some of share, lanes, max_ct",
        ),
    ],
)
def test_a_call_with_other_arguments_says_what_to_pass(call, said):
    with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
        call()
