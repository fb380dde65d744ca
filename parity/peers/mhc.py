"""torch.compile of the hyper-connection site, with the model's roundings."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.graphs import captured

EPS, HC_EPS, ITERATIONS = 1e-20, 1e-6, 20


def coefficients(x, fn, scale, base):
    m = x.shape[-2]
    z = x.flatten(-2).float()
    mixes = (z @ fn.T) * torch.rsqrt((z * z).mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes[..., :m] * scale[0] + base[:m]) + HC_EPS
    post = 2 * torch.sigmoid(mixes[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mixes[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    return pre, post, comb


def site(x, y, post, comb, mix, norm, fn, scale, base):
    mixed = (comb[..., None] * x.float()[..., None, :]).sum(-3)
    new = (post[..., None] * y.float()[..., None, :] + mixed).bfloat16()
    read = (mix[..., None] * new.float()).sum(-2).bfloat16().float()
    read = norm.float() * (read * torch.rsqrt((read * read).mean(-1, keepdim=True) + EPS))
    return new, read.bfloat16(), *coefficients(new, fn, scale, base)


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    if case.name.startswith("coefficients"):
        return {"torch.compile": captured(coefficients, inputs[0], *inputs[6:9])}
    return {"torch.compile": captured(site, *inputs[:9])}
