"""Snapshots: their bytes, their independence of the cache, and files that are whole and belong here, or refused."""

import copy
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from flax import nnx

from dsv41_jax import Model, atomic
from dsv41_jax.config import Config
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.files import snapshot
from dsv41_jax.files.snapshot import SnapshotError
from dsv41_jax.nn.cache import init_cache, nbytes_per_token
from dsv41_jax.numerics import numerics_by_name

CAPACITY = 48
FORMATS = ("float32", "reference", "fast", "fast-fp8", "fast-bf16")


def bytes_of(rng, like):
    """Random bits that are numbers of any dtype, never NaN: both bytes of a bfloat16 and all of a float stay small."""
    bits = rng.integers(0, 0x3F, (*like.shape, like.dtype.itemsize), np.uint8)
    return bits.view(like.dtype).reshape(like.shape)


def full_cache(cfg, name, length, capacity=CAPACITY, seed=0):
    """A cache of random content everywhere, dead rows too."""
    rng = np.random.default_rng(seed)
    cache = init_cache(cfg, len(length), capacity, numerics_by_name(name))
    layers = tuple(jax.tree.map(lambda leaf: jnp.asarray(bytes_of(rng, leaf)), layer) for layer in cache.layers)
    return replace(cache, layers=layers, length=jnp.asarray(length, jnp.int32))


def sources(cache):
    return [layer for layer in cache.layers if layer.main is not None]


def same(one: Snapshot, two: Snapshot):
    np.testing.assert_array_equal(one.length, two.length)
    assert len(one.entries) == len(two.entries)
    for mine, theirs in zip(sum(one.entries, ()), sum(two.entries, ()), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [[2, 2], [46, 46]])
def test_a_snapshot_is_the_global_entries_and_no_byte_more(name, length):
    cfg = small_config()
    taken = Snapshot.of(full_cache(cfg, name, length))
    assert taken.nbytes == nbytes_per_token(cfg, numerics_by_name(name)) * sum(length)
    assert taken.nbytes == sum(part.nbytes for pair in taken.entries for part in pair)
    assert all(isinstance(part, np.ndarray) for pair in taken.entries for part in pair)


def test_a_released_token_is_890_bytes_of_a_snapshot():
    cfg = Config.flash()
    cache = replace(init_cache(cfg, 1, 4096, numerics_by_name("fast")), length=jnp.array([4000], jnp.int32))
    assert Snapshot.of(cache).nbytes == 890 * 4000


@pytest.mark.parametrize("name", FORMATS)
def test_live_rows_are_the_caches_bit_for_bit_and_the_rest_is_zero(name):
    length = np.array([13, 1, 0, 32, 7])
    cache = full_cache(small_config(), name, length)
    taken = Snapshot.of(cache)
    np.testing.assert_array_equal(taken.length, length)
    assert len(taken.entries) == 2
    for layer, pair in zip(sources(cache), taken.entries, strict=True):
        for stored, mine in zip((layer.main, layer.index_keys), pair, strict=True):
            stored = np.asarray(stored)
            assert mine.dtype == stored.dtype and mine.shape[1] >= 32 // layer.ratio
            for row, n in enumerate(length // layer.ratio):
                assert mine[row, :n].tobytes() == stored[row, :n].tobytes()
                assert not mine[row, n:].view(np.uint8).any()


def test_a_snapshot_does_not_follow_the_cache(small):
    cache = full_cache(small.config, "float32", [9, 4])
    taken = Snapshot.of(cache)
    kept = [part.copy() for pair in taken.entries for part in pair]
    overwrite = jax.jit(lambda c: jax.tree.map(lambda leaf: leaf * 0 + 1, c), donate_argnums=0)
    for _ in range(3):
        cache = overwrite(cache)  # what a step does: the buffers are reused
    for one, two in zip(kept, sum(taken.entries, ()), strict=True):
        assert one.tobytes() == two.tobytes()
    assert taken.length.tolist() == [9, 4]


# Files.


@pytest.fixture(scope="module")
def taken(small):
    return Snapshot.of(full_cache(small.config, "float32", [5, 2]))


@pytest.fixture(scope="module")
def exported(small, taken, tmp_path_factory):
    """The bytes of a file."""
    path = tmp_path_factory.mktemp("snapshot") / "a.snapshot"
    small.export_snapshot(taken, path)
    assert list(path.parent.iterdir()) == [path]
    return path.read_bytes()


def refused(model, path, message=r"^[^\n]+$"):
    with pytest.raises(SnapshotError, match=message) as caught:
        model.import_snapshot(path)
    assert len(str(caught.value).splitlines()) == 1
    assert path.name in str(caught.value)


def like(model, *, name=None, cfg=None, params=None):
    """Another model that differs in what is named."""
    cfg = cfg or model.config
    return Model(cfg, params or model.params, numerics=name or model.numerics.name, engram=model.engram)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [[13, 1, 32], [0, 0, 0], [48, 47, 48]])
def test_a_file_gives_back_every_bit(small, name, length, tmp_path):
    model = like(small, name=name)
    taken = Snapshot.of(full_cache(small.config, name, length))
    model.export_snapshot(taken, tmp_path / "x")
    same(model.import_snapshot(tmp_path / "x"), taken)
    model.export_snapshot(taken, str(tmp_path / "y"))  # a second export replaces nothing else and is the same file
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_loaded_snapshot_owns_its_bytes(small, taken, tmp_path):
    small.export_snapshot(taken, tmp_path / "x")
    loaded = small.import_snapshot(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff" * (tmp_path / "x").stat().st_size)
    same(loaded, taken)


def test_special_numbers_survive(small, taken, tmp_path):
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    entries = tuple(tuple(np.resize(odd, part.shape) for part in pair) for pair in taken.entries)
    full = replace(taken, length=np.array([4, 4], np.int32), entries=entries)
    full = replace(
        full, entries=tuple(tuple(p[:, : 4 // r] for p in pair) for r, pair in zip((2, 1), entries, strict=True))
    )
    small.export_snapshot(full, tmp_path / "x")
    same(small.import_snapshot(tmp_path / "x"), full)


def flipped(value, rng):
    """A copy of an array with one bit of one byte changed."""
    raw = np.array(value)
    flat = raw.reshape(-1).view(np.uint8)
    flat[rng.integers(flat.size)] ^= 1 << rng.integers(8)
    return raw


def test_one_flipped_bit_of_any_parameter_is_another_model(small):
    paths, tree = jax.tree_util.tree_flatten_with_path(small.params)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    rng, seen = np.random.default_rng(0), {small.fingerprint}
    names = sorted(named)
    for place in range(0, len(names), 6):
        leaves = [jnp.asarray(flipped(leaf, rng)) if n == names[place] else leaf for n, leaf in named.items()]
        found = snapshot.fingerprint(jax.tree_util.tree_unflatten(tree, leaves), small.engram)
        assert found not in seen, names[place]
        seen.add(found)


def test_rearranged_parameters_are_another_model(small):
    other = nnx.clone(small.params)
    one, two = other.layers[1].attn.wq_a, other.layers[2].attn.wq_a
    one.weight[...], two.weight[...] = two.weight[...], one.weight[...]
    assert snapshot.fingerprint(other, small.engram) != small.fingerprint
    for axis in (0, 1):
        other = nnx.clone(small.params)
        other.embed.weight[...] = jnp.flip(other.embed.weight[...], axis)
        assert snapshot.fingerprint(other, small.engram) != small.fingerprint
    again = random_model(small_config())
    assert again.fingerprint == small.fingerprint


def test_an_engram_row_changed_is_another_model(small):
    rng, (table,) = np.random.default_rng(0), small.engram.tables
    rows = [0, len(table.weight) - 1, *rng.integers(0, len(table.weight), 6)]
    for row in rows:
        for name in ("weight", "scale"):
            changed = np.array(getattr(table, name))
            changed[row, rng.integers(changed.shape[1])] ^= 1
            memory = copy.copy(small.engram)
            memory.tables = (replace(table, **{name: changed}),)
            assert snapshot.fingerprint(small.params, memory) != small.fingerprint, (row, name)


def test_another_token_map_is_another_model(small):
    memory = copy.copy(small.engram)
    memory.token_map = np.roll(memory.token_map, 1)  # other tokens share a compressed id: other rows are looked up
    assert snapshot.fingerprint(small.params, memory) != small.fingerprint


def test_a_file_of_another_model_config_or_numerics_is_refused(small, exported, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(exported)
    assert like(small).import_snapshot(path).length.tolist() == [5, 2]
    refused(random_model(small_config(), seed=1), path, "model")
    weights = nnx.clone(small.params)
    weights.norm.weight[...] = jnp.asarray(flipped(weights.norm.weight[...], np.random.default_rng(1)))
    refused(like(small, params=weights), path, "model")
    for change in ({"rope_theta": 20000}, {"candidate_topk_blocks": 4}, {"max_position_embeddings": 2048}):
        refused(like(small, cfg=small_config(**change)), path, "config")
    for name in FORMATS[1:]:
        refused(like(small, name=name), path, "numerics")


def test_a_file_with_any_byte_changed_is_refused(small, exported, tmp_path):
    path, rng = tmp_path / "x", np.random.default_rng(0)
    header = 8 + int.from_bytes(exported[:8], "little")
    assert header < len(exported) and exported[8:9] == b"{"
    for place in [*range(16), *range(17, header, 3), *range(header, len(exported), 41), len(exported) - 1]:
        damaged = bytearray(exported)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        refused(small, path)
    for place in range(8, header, 3):
        if exported[place : place + 1] != b" ":  # one blank for another says the same
            path.write_bytes(exported[:place] + b" " + exported[place + 1 :])
            refused(small, path)


def test_a_file_cut_short_or_longer_is_refused(small, exported, tmp_path):
    path = tmp_path / "x"
    for length in [*range(0, 40), *range(40, len(exported), 97), len(exported) - 1]:
        path.write_bytes(exported[:length])
        refused(small, path)
    for more in (b"\0", b"\n", b"x" * 100, exported):
        path.write_bytes(exported + more)
        refused(small, path)


def safetensors(meta, tensors):
    """A safetensors file by its definition."""
    header, data = {"__metadata__": meta} if meta is not None else {}, b""
    for name, array in tensors.items():
        kind = {"float32": "F32", "uint8": "U8", "int32": "I32"}[str(array.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_what_is_no_snapshot_is_refused(small, exported, tmp_path):
    path = tmp_path / "x"
    array = {"layers.1.main": np.zeros((1, 1, 32), np.float32)}
    size = int.from_bytes(exported[:8], "little")
    meta = json.loads(json.loads(exported[8 : 8 + size])["__metadata__"]["snapshot"])
    about = lambda meta: {"snapshot": json.dumps(meta)}  # noqa: E731
    for content in (
        b"not a snapshot at all, but some lines\nof text\n" * 9,
        safetensors(None, array),
        safetensors({}, array),
        safetensors({"format": "pt"}, array),
        safetensors({"snapshot": "null"}, array),
        safetensors({"snapshot": "[" * 100_000}, array),
        safetensors({"snapshot": meta}, array),
        safetensors(about(meta), {}),
        safetensors(about(meta), array),
        safetensors(about(meta | {"lengths": "[[]]"}), array),
        b"\xff" * 200,
        (2**62).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (2).to_bytes(8, "little") + b"[]",
    ):
        path.write_bytes(content)
        refused(small, path)
    for key in meta:
        path.write_bytes(safetensors(about({k: v for k, v in meta.items() if k != key}), array))
        refused(small, path)
    with pytest.raises((FileNotFoundError, SnapshotError)):
        small.import_snapshot(tmp_path / "missing")
    with pytest.raises((OSError, SnapshotError)):
        small.import_snapshot(tmp_path)


@pytest.mark.parametrize("lengths", ["x", None, [1e14], [10**14], [[5], [2]], [5], [5, 2, 1], [-5, 2], [5000, 2], []])
def test_lengths_that_are_none_of_these_entries_are_refused_though_the_checksum_is_right(
    small, taken, lengths, tmp_path
):
    path, about = tmp_path / "x", snapshot.identity(small.config, small.numerics, small.fingerprint)
    small.export_snapshot(taken, path)
    infos = snapshot.read_header(path).tensors
    tensors = {name: np.array(info.mapped()) for name, info in infos.items()}
    meta = {**about, "lengths": lengths}
    meta["sha256"] = snapshot._checksum(meta, tensors)
    path.write_bytes(safetensors({"snapshot": json.dumps(meta)}, tensors))
    refused(small, path, "lengths|tokens")
    meta = {**about, "lengths": [5, 2]}
    path.write_bytes(
        safetensors({"snapshot": json.dumps(meta | {"sha256": snapshot._checksum(meta, tensors)})}, tensors)
    )
    same(small.import_snapshot(path), taken)


def test_identity_is_of_the_configs_fields_and_not_of_what_was_asked_of_it(small):  # plans, once made, were in it
    one, two = small_config(), small_config()
    assert two.layers and two.draft_stages == () and two.unknown_keys == ()
    assert snapshot.identity(one, small.numerics, "") == snapshot.identity(two, small.numerics, "")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_no_snapshot(small, kind, tmp_path):
    path = tmp_path / "x"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    refused(small, path, "not a regular file")


def test_long_values_of_a_file_are_not_repeated(small, taken, tmp_path):
    path, about = tmp_path / "x", snapshot.identity(small.config, small.numerics, small.fingerprint)
    small.export_snapshot(taken, path)
    tensors = {name: np.array(info.mapped()) for name, info in snapshot.read_header(path).tensors.items()}
    for change in ({"lengths": [7] * 100_000}, {"lengths": "7" * 100_000}, {"model": "m" * 100_000}):
        meta = {**about, **change}
        meta["sha256"] = snapshot._checksum(meta, tensors)
        path.write_bytes(safetensors({"snapshot": json.dumps(meta)}, tensors))
        with pytest.raises(SnapshotError) as caught:
            small.import_snapshot(path)
        assert len(str(caught.value)) < 2000


def test_a_snapshot_of_other_shapes_is_not_exported_over_a_good_file(small, taken, exported, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(exported)
    with pytest.raises((ValueError, TypeError)):
        small.export_snapshot(replace(taken, entries=taken.entries[:1]), path)
    assert path.read_bytes() == exported and list(tmp_path.iterdir()) == [path]


# Killed while writing.

SERVER = """
import json, os, signal, sys, time
import numpy as np
from pathlib import Path
from dsv41_jax import atomic
from dsv41_jax.files import snapshot
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.config import Config
cfg, about = Config.from_dict(json.loads(sys.argv[1])), json.loads(sys.argv[2])
entries = {}
for seed in (1, 2):
    rng = np.random.default_rng(seed)
    part = lambda rows: rng.integers(0, 256, (1, rows, 128), np.uint8).view(np.float32)
    entries[seed] = Snapshot(np.array([32000], np.int32), ((part(16000), part(16000)), (part(32000), part(32000))))
for line in sys.stdin:
    target, seed, moment, seconds = line.split()
    began, child = time.perf_counter(), os.fork()
    if not child:
        snapshot.write_snapshot(Path(target), entries[int(seed)], cfg, about)
        os._exit(0)
    while moment == "writing" and not atomic.partials(Path(target)) and time.perf_counter() - began < 5:
        pass
    if moment != "never":
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still its own
    print(os.waitpid(child, 0)[1], time.perf_counter() - began, flush=True)
"""


@pytest.fixture(scope="module")
def server(small):
    """A process that forks one for each export, and kills it: starting JAX forty times would take minutes."""
    about = dict(snapshot.identity(small.config, small.numerics, small.fingerprint))
    command = [sys.executable, "-W", "ignore", "-u", "-c", SERVER, small.config.json_text, json.dumps(about)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def export(target: Path, seed: int, moment: str = "never", seconds: float = 0.0) -> tuple[int, float]:
        """(wait status, seconds) of an export, killed so long after its "start" or after its file is "writing"."""
        process.stdin.write(f"{target} {seed} {moment} {seconds}\n")
        status, took = process.stdout.readline().split()
        return int(status), float(took)

    yield export
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


@pytest.mark.parametrize("present", [True, False])
def test_killed_at_twenty_moments_the_old_or_the_new_file_stands_whole(small, server, present, tmp_path):
    old, new, target = tmp_path / "old", tmp_path / "new", tmp_path / "target"
    assert server(old, 1)[0] == 0
    seconds = min(server(new, 2)[1] for _ in range(3))
    before, after = old.read_bytes(), new.read_bytes()
    assert before != after and len(before) > 12_000_000
    same(small.import_snapshot(new), small.import_snapshot(new))
    rng, stood, cut = np.random.default_rng(6), [], 0
    for moment in range(20):
        target.unlink(missing_ok=True)
        if present:
            target.write_bytes(before)
        when = ("start", "writing")[moment % 2]
        status, _ = server(target, 2, when, seconds * (moment + rng.uniform()) / 20)
        assert status in (0, signal.SIGKILL)
        held = target.read_bytes() if target.exists() else None
        assert held in ((before, after) if present else (None, after)), moment
        stood.append(held == after)
        cut += bool(atomic.partials(target))
        assert stood[-1] or status == signal.SIGKILL
    assert cut and not all(stood)  # some did stop in the middle
    assert server(target, 2)[0] == 0
    assert target.read_bytes() == after
    assert set(tmp_path.iterdir()) == {old, new, target}
    small.import_snapshot(target)
