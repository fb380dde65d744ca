"""The model on the kernels: what is refused, that released sizes pass every kernel's rules, and a GPU's results."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dsv41_jax import Model
from dsv41_jax.engine.programs import split_for_kernels
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.dspark import draft
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.random import random_parameters
from dsv41_jax.nn.transformer import Call, abstract_parameters
from dsv41_jax.numerics import NUMERICS, check_backend
from pallas_kernels import BackendError
from parity import backend
from parity.table import FAIL, PASS

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def test_a_model_on_a_machine_without_a_gpu_is_refused():
    cfg = small_config(engram_layer_ids=[], engram_num_embeddings=[])
    with pytest.raises(BackendError, match="the model needs a GPU, the default device is cpu"):
        Model(cfg, random_model(cfg).params, backend="pallas")


def test_several_devices_are_refused_in_one_line():
    with pytest.raises(BackendError, match="kernels run on one device, the mesh has 8"):
        check_backend("pallas", 8)
    check_backend("pallas", 1)
    check_backend("xla", 8)


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (1, 40)], ids=["decode", "prefill"])
def test_kernels_take_the_released_sizes(batch, tokens):
    """Traced for an H200: every kernel checks its shapes, and none of them is computed here."""
    memory = {"engram_layer_ids": [1], "engram_num_embeddings": [1000]}
    drafts = {"num_nextn_predict_layers": 1, "dspark_block_size": 5, "dspark_target_layer_ids": [3]}
    cfg = backend.released(**memory, **drafts)
    numerics = replace(NUMERICS["fast"], backend="pallas")

    def run(params, ids):
        columns, width = (batch, tokens, cfg.engram_columns), cfg.engram_head_dim
        codes, scales = (jnp.zeros((*columns, size), jnp.uint8) for size in (width, width // 32))
        rows = EngramRows(codes, scales, jnp.zeros(columns, jnp.int32))
        call = Call(ids, jnp.full(batch, tokens, jnp.int32), (rows,))
        logits, state, _ = params(call, init_cache(cfg, batch, 64, numerics), cfg=cfg, numerics=numerics)
        weights, last = (params.embed.weight[...], params.head.weight[...]), ids[:, -1]
        guess = lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32)  # noqa: E731
        return logits, draft(
            params.mtp, *weights, state.drafts, state.length, last, guess, cfg=cfg, numerics=numerics
        ).ids

    ids, parameters = jax.ShapeDtypeStruct((batch, tokens), jnp.int32), abstract_parameters(cfg)
    with use_abstract_mesh(H200):
        logits, drafts = jax.eval_shape(run, jax.eval_shape(split_for_kernels, parameters), ids)
    assert (logits.shape, drafts.shape) == ((batch, tokens, cfg.vocab_size), (batch, cfg.dspark_block_size))


@pytest.mark.parametrize(("error", "verdict"), [(0.014, PASS), (0.016, FAIL), (np.nan, FAIL)])
def test_kernels_may_be_half_as_far_again_from_float32_as_xla(monkeypatch, error, verdict):
    def run(_cfg, _params, numerics, *_):
        exact = numerics.dtype == jnp.float32
        return {"prompt/logits": np.ones((3, 5)) + (0 if exact else {"xla": 0.01, "pallas": error}[numerics.backend])}

    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr(backend, "numerics_by_name", lambda name, of="xla": replace(NUMERICS[name], backend=of))
    row, *others = backend.compare(small_config(), None, "fast", prompt=4, decoded=0, batch=3)
    assert (row.case, row.array, row.verdict, others) == ("prompt", "logits", verdict, [])


def test_what_is_compared_are_the_models_logits_and_taps():
    cfg = small_config(
        num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[],
    )  # fmt: skip
    params, tokens = random_parameters(cfg, 0, on_device=True), np.arange(12).reshape(2, 6)
    found = backend.run(cfg, params, NUMERICS["float32"], tokens, 5)
    logits, _, seen = Model(cfg, params, numerics="float32")(tokens, taps=["layers.0.out"])
    np.testing.assert_allclose(found["prompt/logits"], logits[:, 4], atol=1e-5)
    np.testing.assert_allclose(found["token 5/logits"], logits[:, 5], atol=1e-5)
    np.testing.assert_allclose(found["prompt/layers.0.out"], seen["layers.0.out"][:, :5], atol=1e-5)
    assert {name.split("/")[1] for name in found} == {"logits", *(f"layers.0.{tap}" for tap in backend.TAPS)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fast", "fast-bf16", "reference"])
def test_kernels_are_as_near_to_float32_as_xla_is(name):
    cfg = backend.released()
    rows = backend.compare(cfg, random_parameters(cfg, 1, on_device=True), name, prompt=300, decoded=3, batch=8)
    assert [row for row in rows if row.verdict != PASS] == []
