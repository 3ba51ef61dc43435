"""Recurrent layers token by token in float64, with their gradients by hand."""

import numpy as np


def recurrence(arrays, ids, scale, grad_out, grad_state):
    """Run over whole sequences in natural order, and back.

    Args:
      arrays: query, key (B, T, N, K), value (B, T, N, V), gate (B, T, N) or (B, T, N,
        K), and beta (B, T, N) for a delta rule.
      ids: (B, T), a document is a run of one id, negative for padding.
      scale: of the queries.
      grad_out, grad_state: (B, T, N, V) and (B, N, K, V).

    Returns:
      (out, state, grads), grads by name.
    """
    x = {name: np.asarray(of, np.float64) for name, of in arrays.items()}
    count = ids.shape[1]
    real = ids >= 0
    before = np.concatenate([np.full((len(ids), 1), -9), ids[:, :-1]], 1)
    begins = real & (ids != before)
    decay = np.exp(x["gate"])
    decay = decay[..., None] if decay.ndim == 4 else decay[..., None, None]

    def where(flags, yes, no):
        return np.where(flags.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)

    shape = (*x["key"].shape[::2], x["key"].shape[3], x["value"].shape[3])
    state = np.zeros((len(ids), *shape[1:]))
    out, steps = np.zeros(x["value"].shape), []
    for t in range(count):
        query, key, value = (x[name][:, t] for name in ("query", "key", "value"))
        old = where(begins[:, t], np.zeros_like(state), state)
        faded = decay[:, t] * old
        new, rest = value, None
        if "beta" in x:
            rest = value - np.einsum("bnkv,bnk->bnv", faded, key)
            new = x["beta"][:, t, :, None] * rest
        after = faded + key[..., None] * new[:, :, None]
        read = scale * np.einsum("bnkv,bnk->bnv", after, query)
        out[:, t] = where(real[:, t], read, np.zeros_like(read))
        state = where(real[:, t], after, state)
        steps.append((old, faded, new, rest, after))
    grads = {name: np.zeros(of.shape) for name, of in x.items()}
    grad = np.asarray(grad_state, np.float64)
    for t in reversed(range(count)):
        old, faded, new, rest, after = steps[t]
        query, key = x["query"][:, t], x["key"][:, t]
        of_out = np.asarray(grad_out, np.float64)[:, t]
        found = {"query": scale * np.einsum("bnkv,bnv->bnk", after, of_out)}
        of_after = grad + scale * query[..., None] * of_out[:, :, None]
        found["key"] = np.einsum("bnkv,bnv->bnk", of_after, new)
        of_new = np.einsum("bnkv,bnk->bnv", of_after, key)
        found["value"], of_faded = of_new, of_after
        if "beta" in x:
            found["beta"] = (of_new * rest).sum(-1)
            found["value"] = of_rest = x["beta"][:, t, :, None] * of_new
            found["key"] -= np.einsum("bnkv,bnv->bnk", faded, of_rest)
            of_faded = of_after - key[..., None] * of_rest[:, :, None]
        of_gate = (of_faded * faded).sum(-1)
        found["gate"] = of_gate if x["gate"].ndim == 4 else of_gate.sum(-1)
        for name, of in found.items():
            grads[name][:, t] = where(real[:, t], of, np.zeros_like(of))
        through = where(begins[:, t], np.zeros_like(grad), decay[:, t] * of_faded)
        grad = where(real[:, t], through, grad)
    return out, state, grads
