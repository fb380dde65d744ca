"""The model on the kernels: what is refused, that released sizes pass every kernel's rules, and a GPU's results."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dsv41_jax import Model, sharding
from dsv41_jax import numerics as quant
from dsv41_jax.nn.block import prepared
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.dspark import draft
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.transformer import abstract_parameters, forward
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
        sharding.check_backend("pallas", sharding.parse("data=2,expert=4"))
    sharding.check_backend("pallas", sharding.parse("data=1"))
    sharding.check_backend("xla", sharding.parse("data=8"))


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (1, 40)], ids=["decode", "prefill"])
def test_kernels_take_the_released_sizes(batch, tokens):
    """Traced for an H200: every kernel checks its shapes, and none of them is computed here."""
    memory = {"engram_layer_ids": [1], "engram_num_embeddings": [1000]}
    drafts = {"num_nextn_predict_layers": 1, "dspark_block_size": 5, "dspark_target_layer_ids": [3]}
    cfg = backend.released(**memory, **drafts)
    num = replace(quant.NUMERICS["fast"], backend="pallas")

    def run(params, ids):
        columns, width = (batch, tokens, cfg.engram_columns), cfg.engram_head_dim
        codes, scales = (jnp.zeros((*columns, size), jnp.uint8) for size in (width, width // 32))
        rows = EngramRows(codes, scales, jnp.zeros(columns, jnp.int32))
        logits, state, _ = forward(params, ids, init_cache(cfg, batch, 64, num), cfg, num=num, rows=[rows])
        weights, last = (params.embed.weight[...], params.head.weight[...]), ids[:, -1]
        guess = lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32)  # noqa: E731
        return logits, draft(params.mtp, *weights, state.drafts, state.length, last, guess, cfg, num).ids

    ids, parameters = jax.ShapeDtypeStruct((batch, tokens), jnp.int32), abstract_parameters(cfg)
    with use_abstract_mesh(H200):
        logits, drafts = jax.eval_shape(run, jax.eval_shape(prepared, parameters), ids)
    assert (logits.shape, drafts.shape) == ((batch, tokens, cfg.vocab_size), (batch, cfg.dspark_block_size))


@pytest.mark.parametrize(("error", "verdict"), [(0.014, PASS), (0.016, FAIL), (np.nan, FAIL)])
def test_kernels_may_be_half_as_far_again_from_float32_as_xla(monkeypatch, error, verdict):
    def run(_cfg, _params, num, *_):
        exact = num.dtype == jnp.float32
        return {"prompt/logits": np.ones((3, 5)) + (0 if exact else {"xla": 0.01, "pallas": error}[num.backend])}

    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr(backend, "numerics", lambda name, of="xla": replace(quant.NUMERICS[name], backend=of))
    row, *others = backend.compare(small_config(), None, "fast", prompt=4, decoded=0, batch=3)
    assert (row.case, row.array, row.verdict, others) == ("prompt", "logits", verdict, [])


def test_what_is_compared_are_the_models_logits_and_taps():
    cfg = small_config(
        num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[],
    )  # fmt: skip
    params, tokens = backend.parameters(cfg, 0), np.arange(12).reshape(2, 6)
    found = backend.run(cfg, params, quant.NUMERICS["float32"], tokens, 5)
    logits, seen = Model(cfg, params, numerics="float32")(tokens, taps=["layers.0.out"])
    np.testing.assert_allclose(found["prompt/logits"][:, 0], logits[:, 4], atol=1e-5)
    np.testing.assert_allclose(found["token 5/logits"][:, 0], logits[:, 5], atol=1e-5)
    np.testing.assert_allclose(found["prompt/layers.0.out"], seen["layers.0.out"][:, :5], atol=1e-5)
    assert {name.split("/")[1] for name in found} == {"logits", *(f"layers.0.{tap}" for tap in backend.TAPS)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fast", "fast-bf16", "reference"])
def test_kernels_are_as_near_to_float32_as_xla_is(name):
    cfg = backend.released()
    rows = backend.compare(cfg, backend.parameters(cfg, 1), name, prompt=300, decoded=3, batch=8)
    assert [row for row in rows if row.verdict != PASS] == []
