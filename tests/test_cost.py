"""What a decoded token costs at 8K, 64K and 512K tokens of context, read off the compiled programs of each layer kind.

The selection's tile is set to the whole cache here. A tile is a working set: results do not depend on it
(test_indexer.py), and the loop over tiles ends where the tokens do (below), but XLA counts the body of a loop once.
FLOPs are those of the compiled program. Bytes are those of the same program before XLA's CPU back end turns each gather
into a loop that carries the whole table and counts it as read: there a gather reads the rows that it names.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from flax import nnx

from dsv41_jax.nn import indexer
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.cache import Span, init_cache
from dsv41_jax.nn.transformer import abstract_parameters
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels.indexer import select

LENGTHS = (8192, 65536, 524288)
NUM, CFG = numerics_by_name("fast"), small_config(max_position_embeddings=1 << 20)
SHAPE = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def cost():
    """{(layer, length): (FLOPs, bytes)} of one token's attention in each layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "select", partial(select, tile=1 << 30))
        lengths = {plan.id: LENGTHS if plan.mode == "full" else LENGTHS[::2] for plan in CFG.layers}
        return {
            (layer, length): layer_cost(CFG.layers[layer], length) for layer in lengths for length in lengths[layer]
        }


def layer_cost(plan, length):
    """Of a program that gets the layer's cache, and where it has none of its own the source's, as leaves."""
    caches = init_cache(CFG, 1, 2, NUM).layers  # of the right structure; the shapes are those of `length`

    def leaves(layer):
        return jax.eval_shape(lambda: jax.tree.leaves(init_cache(CFG, 1, length, NUM).layers[layer]))

    def token(state, x, source, kept, start):
        kept, published = jax.tree.unflatten(jax.tree.structure(caches[plan.id]), kept), Shared()
        if source:
            rows = jax.tree.unflatten(jax.tree.structure(caches[plan.kv_source]), source)
            selected, blocks = (jnp.zeros((1, 1, k), jnp.int32) for k in (CFG.index_topk, CFG.candidate_topk_blocks))
            published = Shared(rows.main, rows.index_keys, selected + start, blocks + start)
        attn = nnx.merge(graph, state)
        span, how = Span.after(start, jnp.ones_like(start), 1), {"plan": plan, "cfg": CFG, "numerics": NUM}
        y, stands, kept, _ = attn(x, published, kept, span, **how)
        return y, kept, stands.selected, stands.blocks

    graph, state = nnx.split(abstract_parameters(CFG).layers[plan.id].attn)
    source = leaves(plan.kv_source) if plan.mode in ("reindex", "reuse") else []
    x, start = SHAPE((1, 1, CFG.hidden_size), jnp.bfloat16), SHAPE((1,), jnp.int32)
    lowered = jax.jit(token, donate_argnums=3).lower(state, x, source, leaves(plan.id), start)
    return lowered.compile().cost_analysis()["flops"], lowered.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("kind", [0, 1], ids=["FLOPs", "bytes"])
def test_window_reuse_and_reindex_layers_cost_the_same_at_any_length(cost, kind):
    flat = [plan.id for plan in CFG.layers if plan.mode in ("window", "reuse", "reindex")]
    assert len(flat) == 3
    for layer in flat:
        assert cost[layer, LENGTHS[0]][kind] == cost[layer, LENGTHS[2]][kind]


@pytest.mark.parametrize("kind", [0, 1], ids=["FLOPs", "bytes"])
def test_sources_cost_a_constant_and_an_amount_a_token(cost, kind):
    for plan in CFG.layers:
        if plan.mode != "full":
            continue
        short, middle, long = (cost[plan.id, length][kind] for length in LENGTHS)
        slope = (middle - short) / (LENGTHS[1] - LENGTHS[0])
        assert long == pytest.approx(short + slope * (LENGTHS[2] - LENGTHS[0]), rel=0.01)
        # The dot products alone are 2 I J FLOPs an entry; a key's row is I J / 2 + J / 32 bytes, read once at least.
        entries, width = 1 / plan.ratio, CFG.index_head_dim
        least = 2 * CFG.index_n_heads * width if kind == 0 else width / 2 + width / 32
        assert slope >= least * entries


def test_selection_takes_time_by_the_tokens_present_not_by_the_capacity():
    """The loop over tiles ends at the last visible entry: an almost empty cache of 64 times the size costs the same."""
    query, heads = jnp.ones((1, 1, CFG.index_n_heads, CFG.index_head_dim)), jnp.ones((1, 1, CFG.index_n_heads))
    run = jax.jit(lambda keys, visible: select(query, keys, heads, visible, count=CFG.index_topk, candidates=3, size=2))

    def seconds(capacity):
        keys, visible, taken = jnp.ones((1, capacity, CFG.index_head_dim)), jnp.full((1, 1), 5, jnp.int32), []
        for _ in range(22):
            begin = time.perf_counter()
            jax.block_until_ready(run(keys, visible))
            taken.append(time.perf_counter() - begin)
        return np.median(taken[2:])

    assert seconds(1 << 20) < 8 * seconds(1 << 14)  # 64 times the entries; the factor allows for a busy machine
