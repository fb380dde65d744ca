"""Meshes: which parameter lies where, what is refused, and logits that do not depend on the mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41_jax import Checkpoint, Config, Model, sharding
from dsv41_jax.engine.tables import EngramLookup
from dsv41_jax.files.inventory import device_bytes, table_bytes
from dsv41_jax.files.load import load
from dsv41_jax.nn.random import random_parameters
from dsv41_jax.nn.transformer import abstract_parameters


def mesh(data: int, expert: int) -> Mesh:
    return jax.make_mesh((data, expert), ("data", "expert"), devices=jax.devices()[: data * expert])


@pytest.fixture(scope="module")
def flash():
    return abstract_parameters(Config.flash())


def test_only_routed_and_draft_experts_are_split_and_only_over_their_number(flash):
    found = {".".join(map(str, path)): place for path, place in placed(flash, "data=2,expert=8").items()}
    split = {name for name, place in found.items() if any(place.spec)}
    assert split == {name for name in found if re.search(r"\.ffn\.experts\.w[123]\.(weight|scale)$", name)}
    assert len(split) == 43 * 6
    assert {found[name].spec for name in split} == {P("expert", None, None)}
    assert found["layers.7.ffn.experts.w1.weight"].shard_shape((384, 2304, 2560)) == (48, 2304, 2560)
    assert found["mtp.1.ffn.experts.w2.scale"].shard_shape((128, 5120, 72)) == (16, 5120, 72)


def placed(params, text):
    return sharding.placements(params, sharding.parse_mesh(text))


def test_mesh_without_an_expert_axis_splits_nothing(flash):
    assert not any(any(place.spec) for place in placed(flash, "data=8").values())


def test_experts_that_do_not_divide_are_refused_in_one_line_with_their_sizes(flash):
    with pytest.raises(ValueError, match=r"^layers") as caught:
        placed(flash, "data=1,expert=5")
    name, rest = str(caught.value).split(": ")
    assert re.fullmatch(r"layers\.0\.ffn\.experts\.w1\.(weight|scale)", name)
    assert rest == "axis 'experts' of 384 does not divide over mesh axis 'expert' of 5 (and 257 more parameters)"


def test_uneven_mesh_is_refused_before_anything_is_allocated(monkeypatch):  # else an unreadable error, and late
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("something was put on a device"))
    with pytest.raises(ValueError, match="'experts' of 6 does not divide over mesh axis 'expert' of 4"):
        load(Checkpoint("tiny"), mesh(1, 4))  # 6 experts, and 4 draft experts that would divide


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor=2", "axis 'tensor' is not one of 'data', 'expert'"),
        ("expert", "'expert' is not NAME=SIZE"),
        ("expert=0", "'expert=0' is not NAME=SIZE"),
        ("expert=-2", "'expert=-2' is not NAME=SIZE"),
        ("data=1,,expert=2", "'' is not NAME=SIZE"),
        ("expert=2,expert=4", "'expert' stands twice"),
    ],
)
def test_bad_mesh_texts_are_named(text, said):
    with pytest.raises(ValueError, match=r"^mesh: ") as caught:
        sharding.parse_mesh(text)
    assert said in str(caught.value)


def test_mesh_with_an_unknown_axis_is_refused_before_the_checkpoint_is_read(monkeypatch):
    monkeypatch.setattr(Checkpoint, "check", lambda *_: pytest.fail("headers were checked"))
    with pytest.raises(ValueError, match="mesh: axis 'model'"):
        Model.from_pretrained("tiny", mesh=jax.make_mesh((2,), ("model",)))


def test_explicit_axes_are_taken_as_automatic_ones():
    explicit = jax.make_mesh((1, 2), ("data", "expert"), (AxisType.Explicit,) * 2)
    taken = sharding.automatic(explicit)
    assert taken.axis_types == (AxisType.Auto,) * 2
    assert (taken.devices.tolist(), taken.axis_names) == (explicit.devices.tolist(), explicit.axis_names)


def test_batches_go_over_data_where_their_rows_divide():
    over = mesh(2, 2)
    batch = {"even": np.zeros((4, 3)), "odd": np.zeros((3, 4)), "scalar": jnp.float32(1), "none": None, "int": 3}
    laid = sharding.shard_batch(batch, over)
    assert laid["even"].sharding.is_equivalent_to(NamedSharding(over, P("data")), 2)
    assert laid["odd"].sharding.is_fully_replicated
    assert laid["scalar"].sharding.is_fully_replicated
    assert (laid["none"], int(laid["int"])) == (None, 3)


def test_bytes_on_each_of_eight_devices_are_the_published_ones(flash):  # plans that forget the tables' scales
    sizes = device_bytes(flash, sharding.parse_mesh("data=1,expert=8"))
    assert sizes["routed experts"] == 543_581_798_400 // 2 * 17 // 16 // 8  # FP4 and a scale byte for every 32: 36.1 GB
    assert sizes["draft experts"] == 13_589_544_960 // 2 * 17 // 16 // 8
    assert sizes["embedding and head"] == 2 * 661_913_600 * 2  # whole on every device, in bfloat16
    assert device_bytes(flash, sharding.parse_mesh("data=8")).total() == 510_286_023_000 - 768_022_850 * 264
    cfg = Config.flash()
    assert table_bytes(cfg, "sharded", 8) == ((48_000_771 + 48_002_086) * 264, 0)  # 384,016,682 / 8 rounded up
    assert table_bytes(cfg, "host", 8) == (0, 768_022_850 * 264)
    assert table_bytes(cfg, "device", 8) == (768_022_850 * 264, 0)
    assert table_bytes(cfg, "mmap", 8) == (0, 0)


def test_logits_and_caches_on_four_devices_equal_those_of_one():
    cfg = small_config(
        num_hidden_layers=2, compress_ratios=[0, 2], kv_source_layer_ids=[1], index_source_layer_ids=[1],
        candidate_source_layer_id=None,
    )  # fmt: skip
    over, whole = mesh(2, 2), random_parameters(cfg)
    graph, state = nnx.split(whole)
    flat, places = dict(nnx.to_flat_state(state)), sharding.placements(whole, over)
    split = {path: leaf.replace(jax.device_put(leaf.get_value(), places[path])) for path, leaf in flat.items()}
    tokens = np.random.default_rng(0).integers(8, 240, (2, 9))
    found = []
    for params in (whole, nnx.merge(graph, nnx.from_flat_state(split))):
        model = Model(cfg, params, numerics="float32", engram=EngramLookup.random(cfg))
        first, cache, _ = model.step(tokens[:, :6], model.init_cache(2, 32))
        kept = cache.layers[0].window
        second, cache, _ = model.step(tokens[:, 6:], cache)
        assert kept.is_deleted()  # the second step consumed the cache where it lay
        found.append((first, second, cache.layers[1].main, cache.layers[0].window))
    for one, four in zip(*found, strict=True):
        np.testing.assert_allclose(one, four, atol=1e-5, rtol=0)
    assert {shard.data.shape[0] for shard in found[1][2].addressable_shards} == {1}  # a row of the batch on each


@pytest.mark.slow
@pytest.mark.parametrize("engram", ["mmap", "sharded"])
def test_bundled_checkpoint_on_four_devices_generates_what_it_does_on_one(engram, tiny):
    model = Model.from_pretrained("tiny", numerics="float32", mesh=mesh(2, 2), engram=engram)
    weight = model.params.layers[0].ffn.experts.w1.weight[...]
    assert {shard.data.shape[0] for shard in weight.addressable_shards} == {3}
    tokens = np.random.default_rng(0).integers(8, 240, (2, 20))
    np.testing.assert_allclose(model(tokens).logits, tiny(tokens).logits, atol=1e-5, rtol=0)
    prompts = [row.tolist() for row in tokens]
    assert model.generate(prompts, 8, draft=True) == tiny.generate(prompts, 8)
