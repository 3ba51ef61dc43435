"""MaxText: ``attention=jaxcomm`` attends around a ring of the context axis.

Call ``install(AttentionOp)`` first, and set ``context_parallel_load_balance=False``.
"""

import functools
import inspect

import flax.linen as nn
import jax

import jaxcomm

TYPES = "global", "local_sliding", "mla", "full"
SERVED = {"query", "key", "value", "decoder_segment_ids", "model_mode", "sinks"}
UNUSED = {"self", "lengths", "qk_product_einsum", "wv_product_einsum"}


def install(op_class):
    """Let the flag ``attention`` of MaxText choose jaxcomm in its ``AttentionOp``."""
    theirs = op_class.apply_attention
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def apply_attention(self, *args, **options):
        if self.attention_kernel != "jaxcomm":
            return theirs(self, *args, **options)
        asked = signature.bind(self, *args, **options).arguments
        given = {name for name, x in asked.items() if x is not None and x is not False}
        others = given - SERVED - UNUSED
        if self.dropout_rate:
            others.add("dropout_rate")
        if getattr(self.config, "context_parallel_load_balance", False):
            others.add("context_parallel_load_balance")
        kind = self.attention_type.value
        if others or kind not in TYPES or asked["model_mode"] == "autoregressive":
            raise ValueError(
                f"attention=jaxcomm: attention_type={kind!r} in the mode "
                f"{asked['model_mode']!r} with {sorted(others)} is not served. Choose "
                "another attention, or leave them out"
            )
        key, value = (
            x.dequant() if hasattr(x, "dequant") else x
            for x in (asked["key"], asked["value"])
        )
        batch, heads, tokens, _ = nn.logical_to_mesh_axes(self.flash_axis_names_q)
        window = self.sliding_window_size if kind == "local_sliding" else None
        out = jaxcomm.dot_product_attention(
            *(asked["query"], key, value),
            sharding=jax.NamedSharding(self.mesh, jax.P(batch, tokens, heads)),
            is_causal=kind != "full",
            scale=1.0,  # MaxText scales the queries
            segment_ids=asked["decoder_segment_ids"],
            local_window_size=None if window is None else (window - 1, 0),
            sinks=asked.get("sinks"),
            logits_soft_cap=self.attn_logits_soft_cap,
        )
        return out, None, None

    op_class.apply_attention = apply_attention
