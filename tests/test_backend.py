"""The model on the kernels: what is refused, that released sizes pass every kernel's rules, and a GPU's results."""

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dsv41_jax import Config, Model, quant, sharding
from dsv41_jax.cache import init_cache
from dsv41_jax.engram import EngramRows
from dsv41_jax.model import abstract_parameters, forward
from pallas_kernels import BackendError

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def released(**changes: object) -> Config:
    """Five layers, every mode among them, of the released widths."""
    base = {
        "num_hidden_layers": 5, "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2, "n_routed_experts": 16,
        "engram_layer_ids": [], "engram_num_embeddings": [], "vision_num_hidden_layers": 0,
        "num_nextn_predict_layers": 0, "dspark_block_size": 0, "dspark_target_layer_ids": [],
        "max_position_embeddings": 65536,
    }  # fmt: skip
    return Config.flash().replace(**(base | changes))


def test_a_model_on_a_machine_without_a_gpu_is_refused():
    cfg = small_config(engram_layer_ids=[], engram_num_embeddings=[])
    with pytest.raises(BackendError, match="the model needs a GPU, the default device is cpu"):
        Model(cfg, random_model(cfg).params, backend="pallas")


def test_several_devices_are_refused_in_one_line():
    with pytest.raises(BackendError, match="kernels run on one device, the mesh has 8"):
        sharding.check_backend("pallas", sharding.parse("data=2,expert=4"))
    sharding.check_backend("pallas", sharding.parse("data=1"))
    sharding.check_backend("xla", sharding.parse("data=8"))


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (1, 40)], ids=["decode", "prefill"])
def test_kernels_take_the_released_sizes(batch, tokens):
    """Traced for an H200: every kernel checks its shapes, and none of them is computed here."""
    cfg = released(engram_layer_ids=[1], engram_num_embeddings=[1000], num_nextn_predict_layers=1, dspark_block_size=5,
                   dspark_target_layer_ids=[3])  # fmt: skip
    num = replace(quant.NUMERICS["fast"], backend="pallas")

    def run(params, ids):
        columns, width = (batch, tokens, cfg.engram_columns), cfg.engram_head_dim
        codes, scales = (jnp.zeros((*columns, size), jnp.uint8) for size in (width, width // 32))
        rows = EngramRows(codes, scales, jnp.zeros(columns, jnp.int32))
        return forward(params, ids, init_cache(cfg, batch, 64, num), cfg, num=num, rows=[rows])[0]

    with use_abstract_mesh(H200):
        logits = jax.eval_shape(run, abstract_parameters(cfg), jax.ShapeDtypeStruct((batch, tokens), jnp.int32))
    assert logits.shape == (batch, tokens, cfg.vocab_size)


@partial(jax.jit, static_argnums=(1, 2, 3))
def draw(key: jax.Array, shape: tuple[int, ...], dtype: object, kind: tuple[float, float]) -> jax.Array:
    """Normal numbers of a (centre, deviation), or bytes of one value where there is no deviation."""
    centre, deviation = kind
    if jnp.dtype(dtype).itemsize == 1 and deviation == 0:
        return jax.lax.bitcast_convert_type(jnp.full(shape, int(centre), jnp.uint8), dtype)
    return (centre + deviation * jax.random.normal(key, shape)).astype(dtype)


@cache
def parameters() -> nnx.Module:
    """As `random_parameters`, drawn on the device."""
    graph, state = nnx.split(abstract_parameters(released()))
    flat = dict(nnx.to_flat_state(state))
    for number, (path, leaf) in enumerate(flat.items()):
        key, name, shape = jax.random.fold_in(jax.random.key(0), number), str(path[-1]), leaf.shape
        if leaf.dtype == jnp.uint8:
            value = jax.random.bits(key, shape, jnp.uint8)
        elif name == "scale":
            spread = 3.0 if len(shape) == 3 else 1.0
            value = draw(key, shape, leaf.dtype, (127 - round(math.log2(spread * (32 * shape[-1]) ** 0.5)), 0.0))
        elif len(shape) > 1:
            unit = leaf.dtype == jnp.float8_e4m3fn or path[0] == "embed"
            value = draw(key, shape, leaf.dtype, (0.0, 1.0 if unit else shape[-1] ** -0.5))
        else:
            value = draw(key, shape, leaf.dtype, (float(name.endswith(("weight", "_scale"))), 0.1))
        flat[path] = leaf.replace(value)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def logits_of(model: Model, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Logits behind a prompt and behind each token after it."""
    state = model.init_cache(len(tokens), 4096)
    found, state = model.step(tokens[:, :prompt], state)
    seen = [np.asarray(found[:, -1])]
    for t in range(prompt, tokens.shape[1]):
        found, state = model.step(tokens[:, t : t + 1], state)
        seen.append(np.asarray(found[:, 0]))
    return np.stack(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fast", "fast-bf16"])
def test_kernels_are_as_near_to_float32_as_xla_is(name):
    """A prompt of 300 tokens, whose entries are all selected, so that no near tie decides; then three decoded ones."""
    cfg, tokens = released(), np.random.default_rng(0).integers(0, 128000, (2, 303))
    exact = Model(cfg, parameters(), numerics=name)
    exact.numerics = exact.programs.num = replace(exact.numerics, dtype=jnp.dtype(jnp.float32))
    wanted = logits_of(exact, tokens, 300)
    xla, pallas = (
        np.linalg.norm(logits_of(Model(cfg, parameters(), numerics=name, backend=backend), tokens, 300) - wanted)
        for backend in ("xla", "pallas")
    )
    assert pallas < 1.5 * xla
