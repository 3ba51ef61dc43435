"""The page of what attention supports and refuses, made of what the code says.

``python tests/support/supported.py > docs/supported.md`` writes it.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from refusals import HELD, OF_DOCUMENTS, REFUSALS, ROWS, WITH_IDS, on_four, x

from jaxcomm.attention import Ranges
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.strategies.choice import STRATEGIES
from jaxcomm.attention.strategies.ulysses import Usp

# Options of a call with four heads, on four ranks that hold two tokens each.
OPTIONS = {
    "nothing": {},
    "`is_causal`": {"is_causal": True},
    "`local_window_size`": {"local_window_size": (3, 3)},
    "`is_causal` and `local_window_size`": {
        "is_causal": True, "local_window_size": (3, 0),
    },
    "segment ids or lengths": {"tokens": WITH_IDS},
    "a length that does not divide": {
        "tokens": dataclasses.replace(HELD, layout=Layout("zigzag", 4, 7)),
    },
    "`document_layout`": {
        "tokens": dataclasses.replace(WITH_IDS, layout=OF_DOCUMENTS.layout),
    },
    "`document_layout` of rows": {
        "tokens": Tokens(ROWS.reorder(x(2, 8))[1].layout, *[jnp.ones((1, 2), int)] * 2),
    },
    "`bias`": {"bias": x(1, 4, 2, 8)},
    "`mask`": {"mask": jnp.ones((1, 1, 2, 8), bool)},
    "`mask=Ranges(...)`": {"mask": Ranges(keys=(np.zeros(2, int), np.ones(2, int)))},
    "`sinks`": {"sinks": x(4)},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    "`alibi_slopes`": {"alibi_slopes": x(4)},
    "`dropout`": {"dropout": (0.1, jax.random.key(0))},
    "`return_residual`": {"return_residual": True},
    "`key_tokens`": {
        "arrays": [(1, 8, 4, 64), (1, 16, 4, 64)],
        "key_tokens": Tokens(Layout("zigzag", 4, 16), jnp.arange(4)),
    },
    "one key head": {"arrays": [(1, 8, 4, 64), (1, 8, 1, 64)]},
    "2 query heads on 4 ranks": {"arrays": [(1, 8, 2, 64)]},
    "keys of 192 and values of 128": {
        "arrays": [(1, 8, 4, 192), (1, 8, 4, 192), (1, 8, 4, 128)],
    },
    "float32": {"dtype": jnp.float32},
    "a head size of 36": {"arrays": [(1, 8, 4, 36)]},
    "a head size of 512": {"arrays": [(1, 8, 4, 512)]},
}  # fmt: skip

KERNELS = {
    "FlashAttention-3, ring": ("ring", "flash"),
    "all-gather": ("all_gather", "flash"),
    "cuDNN, ring": ("ring", "cudnn"),
}


def _answer(options, strategy, implementation=None) -> str | None:
    """Return None if the call and its gradient can be traced, or why not.

    For a kernel that is named the mesh is one of GPUs.
    """
    options = dict(options)
    shapes = options.pop("arrays", [(1, 8, 4, 64)])
    dtype = options.pop("dtype", jnp.bfloat16)
    query, *others = (x(*shape, dtype=dtype) for shape in shapes)
    key = others[0] if others else query
    value = others[1] if len(others) > 1 else key
    options = {"tokens": HELD} | options
    how = {"strategy": strategy, "implementation": implementation}

    def loss(*arrays):
        out = ring_attention(*arrays, "context", **options, **how)
        return sum(leaf.sum().astype(jnp.float32) for leaf in jax.tree.leaves(out))

    try:
        platform = implementation and "gpu"
        on_four(jax.grad(loss), query, key, value, platform=platform)
    except ValueError as error:
        reason = re.search(r" was asked for, but (.*?)\. Pass ", str(error), re.S)
        if reason is None:
            raise
        return reason.group(1)
    return None


def _table() -> list[str]:
    strategies = {name: name for name in STRATEGIES} | {"usp": Usp(2)}
    columns = [*(f'`"{name}"`' for name in strategies), *KERNELS]
    lines = [f"| option | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    reasons: dict[str, int] = {}

    def cell(reason):
        if reason is None:
            return "yes"
        return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"

    for name, options in OPTIONS.items():
        windowed = {"local_window_size": (3, 3)} | options
        answers = [
            *(
                _answer(windowed if s == "halo" else options, s)
                for s in strategies.values()
            ),
            *(_answer(options, *how) for how in KERNELS.values()),
        ]
        lines.append(f"| {name} | {' | '.join(map(cell, answers))} |")
    return [*lines, "", *(f"{n}. `{reason}`" for reason, n in reasons.items())]


@functools.cache
def page() -> str:
    lines = [
        "# Supported and refused",
        "",
        "`python tests/support/supported.py > docs/supported.md` writes this page. It",
        "makes each call and notes what the code says. See [attention](attention.md).",
        "",
        "## Options and strategies",
        "",
        "Four ranks, four heads of size 64, bfloat16, `zigzag`, forward and backward.",
        '`"halo"` has a window in each row. The last columns say whether',
        "FlashAttention-3 and cuDNN may compute all hops on an NVIDIA GPU. Otherwise",
        "another kernel does, or XLA. Numbers are those of the reasons below the",
        "table.",
        "",
        *_table(),
        "",
        "## Errors",
        "",
        "These calls on four ranks raise before anything runs.",
        "",
    ]
    for of in dict.fromkeys(refusal.of for refusal in REFUSALS):
        lines += [f"### `{of}`", "", "| asked | error |", "| --- | --- |"]
        for refusal in REFUSALS:
            if refusal.of == of:
                error = refusal.raised()
                text = re.sub(r"\s+", " ", str(error)).replace("|", "\\|")
                kind = type(error).__name__
                lines.append(f"| {refusal.asked} | ``{kind}: {text}`` |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
