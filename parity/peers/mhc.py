"""torch.compile of the hyper-connection site, with the model's roundings."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.formats import rounded
from parity.peers.graphs import Formula, captured, compiled

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
    new = rounded(post[..., None] * y.float()[..., None, :] + mixed)
    read = rounded((mix[..., None] * new).sum(-2))
    read = norm.float() * (read * torch.rsqrt((read * read).mean(-1, keepdim=True) + EPS))
    return new.bfloat16(), read.bfloat16(), *coefficients(new, fn, scale, base)


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What the case computes, of its own arrays; the last of them is fn as our kernel reads it."""
    alone = case.name.startswith("coefficients")
    run = compile(coefficients if alone else site)
    return lambda *arrays: run(arrays[0], *arrays[6:9]) if alone else run(*arrays[:9])


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.compile": captured(formula(case, compiled), *inputs)}
