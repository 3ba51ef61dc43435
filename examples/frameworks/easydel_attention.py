"""EasyDeL: ``attn_mechanism="jaxcomm"`` attends around a ring of the sequence's axis.

Import this before the model is made. Single tokens, from a cache, go to EasyDeL's ring.
"""

import jax
from easydel.operations import AttentionOutput, OperationRegistry, RingAttn

import jaxcomm

# What MaskInfo holds as a mask alone, and not as segment ids.
BAKED = ("sliding_window_baked_in", "chunked_mask_baked_in", "token_type_ids_baked_in")


@OperationRegistry.register
class JaxcommAttn(RingAttn):
    """Attention over a split sequence, in natural order."""

    @classmethod
    def get_impl_name(cls):
        """Return what ``attn_mechanism`` calls it."""
        return "jaxcomm"

    def forward_native(
        self, query, key, value, softmax_aux=None, mask_info=None, bias=None,
        logits_soft_cap=None, softmax_scale=None, sliding_window=None, causal=True,
        deterministic=True, **rest,
    ):  # fmt: skip
        """Compute ``jaxcomm.dot_product_attention`` over the mesh of the metadata."""
        if query.shape[1] == 1:
            return super().forward_native(
                query=query, key=key, value=value, softmax_aux=softmax_aux, bias=bias,
                mask_info=mask_info, logits_soft_cap=logits_soft_cap, causal=causal,
                softmax_scale=softmax_scale, sliding_window=sliding_window, **rest,
            )  # fmt: skip
        baked = [name for name in BAKED if getattr(mask_info, name, False)]
        drops = not deterministic and self.metadata.dropout_prob
        has_sinks = softmax_aux is not None
        if baked or drops or has_sinks or query.shape[1] != key.shape[1]:
            raise NotImplementedError(
                f"attn_mechanism='jaxcomm': {baked=}, {drops=}, {has_sinks=}, "
                f"{query.shape[1]} queries of {key.shape[1]} keys. Pass sliding_window "
                "as an argument, no dropout, no softmax_aux, as many queries as keys"
            )
        mode = self.get_mode(query=query, BTHD=True)
        shardings = self.metadata.get_shardings(mode=mode, layout="bthd")
        ids = mask_info and (mask_info.q_segment_ids, mask_info.kv_segment_ids)
        dtype = self.metadata.runtime_dtype
        out = jaxcomm.dot_product_attention(
            *(x.astype(dtype) for x in (query, key, value)), bias,
            sharding=jax.NamedSharding(self.metadata.mesh, shardings.query),
            is_causal=causal, scale=softmax_scale,
            segment_ids=ids or None, local_window_size=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        return AttentionOutput(attention_weights=None, attention_outputs=out)
