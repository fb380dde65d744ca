"""The load onto a mesh: which bytes are read, where they go, what the host holds meanwhile, how it goes on."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import GOLDEN, ROOT, small_config
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inventory import expected, full, write_shard  # noqa: F401  (the fixture `full` asks for `expected`)
from test_safetensors import FILE, decode, leaves

from dsv41_jax import Checkpoint, CheckpointError, Config, Model
from dsv41_jax.files.expected import expected_tensors
from dsv41_jax.files.load import byte_ranges, load, load_tables

TABLES = re.compile(r"layers\.\d+\.engram\.embed\.")


def mesh(data: int, expert: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, expert), ("data", "expert"), devices=jax.devices()[: data * expert])


@pytest.fixture(scope="module")
def stored() -> dict:
    return decode((GOLDEN["tiny-full"] / FILE).read_bytes())


@pytest.fixture
def directory(tmp_path) -> Path:
    for name in ("config.json", FILE):
        shutil.copy(GOLDEN["tiny-full"] / name, tmp_path)
    return tmp_path


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """(first, last) byte of every read, in order."""
    seen = []
    true = os.preadv

    def preadv(descriptor, buffers, offset, *flags):
        count = true(descriptor, buffers, offset, *flags)
        seen.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_byte_ranges_are_those_of_the_slice_in_its_order_and_as_few_as_can_be(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    index = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    runs = list(byte_ranges(shape, index, 4))
    raw = array.tobytes()
    assert b"".join(raw[at : at + length] for at, length in runs) == array[index].tobytes()
    assert all(length > 0 for _, length in runs)
    assert all(at + length < after for (at, length), (after, _) in pairwise(runs))


def test_each_device_holds_its_experts_and_all_of_everything_else(stored):
    over = mesh(2, 2)
    params = load(Checkpoint("tiny"), over)
    for path, leaf in nnx.to_flat_state(nnx.state(params)):
        name, shards = ".".join(map(str, path)), leaf[...].addressable_shards
        assert len(shards) == 4
        for shard in shards:
            (place,) = np.argwhere(over.devices == shard.device)
            if ".experts." not in name:
                wanted = stored[name][2]
            else:
                half = leaf.shape[0] // 2
                experts = range(place[1] * half, (place[1] + 1) * half)
                wanted = b"".join(stored[name.replace(".experts.", f".experts.{e}.")][2] for e in experts)
            assert np.asarray(shard.data).tobytes() == wanted, name


def test_each_byte_is_read_once_and_no_device_gets_more_than_its_share(stored, reads, monkeypatch):
    received = Counter()
    true = jax.device_put

    def device_put(array, device, *more, **options):
        received[device] += array.nbytes
        return true(array, device, *more, **options)

    monkeypatch.setattr(jax, "device_put", device_put)
    load(Checkpoint("tiny"), mesh(2, 2))
    sizes = Counter()
    for name, (_, _, content) in stored.items():
        if not TABLES.match(name):
            sizes["experts" if ".experts." in name else "others"] += len(content)
    spans = sorted(reads)
    assert sum(last - first for first, last in spans) == sizes.total()
    assert all(last <= after for (_, last), (after, _) in pairwise(spans))  # nothing twice
    assert received == dict.fromkeys(jax.devices()[:4], sizes["experts"] // 2 + sizes["others"])


def test_interrupted_load_goes_on_where_it_stopped(reads):
    checkpoint = Checkpoint(GOLDEN["text-min"])
    over, kept, names = mesh(1, 2), {}, []

    def stop(done, total, name):
        names.append(name)
        if done == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, over, on_progress=stop, loaded=kept)
    assert list(kept) == names
    assert len(names) == 50
    first = sum(last - start for start, last in reads)
    params = load(checkpoint, over, loaded=kept)
    once = sum(last - start for start, last in reads)
    assert leaves(params) == leaves(load(checkpoint))
    assert 0 < first < once
    assert sum(last - start for start, last in reads) == 2 * once  # the plain load reads as much as the two together
    with pytest.raises(ValueError, match=r"^loaded: embed\.weight is [^\n]*$"):
        load(checkpoint, mesh(2, 1), loaded=kept)
    with pytest.raises(ValueError, match=r"^loaded: embed\.weight is [^\n]*$"):
        load(checkpoint, loaded=kept)


def test_files_are_closed_after_a_load_and_after_an_error(directory):
    checkpoint = Checkpoint(directory)
    load(checkpoint)
    os.truncate(directory / FILE, (directory / FILE).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"1 problem: [\w.]+: model\.safetensors ends before its data$"):
        load(checkpoint)
    still = [link for link in Path("/proc/self/fd").iterdir() if link.exists() and link.resolve() == directory / FILE]
    assert still == []


def test_chosen_parameters_are_loaded_and_the_others_take_no_memory(stored, reads):
    params = load(Checkpoint("tiny"), only=lambda name: name.startswith(("layers.3.", "norm.")))
    kinds = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(params))}
    chosen = {name for name, value in kinds.items() if isinstance(value, jax.Array)}
    assert chosen == {name for name in kinds if name.startswith("layers.3.") or name == "norm.weight"}
    assert all(isinstance(value, jax.ShapeDtypeStruct) for name, value in kinds.items() if name not in chosen)
    wanted = sum(len(t[2]) for name, t in stored.items() if name.startswith("layers.3.") or name == "norm.weight")
    assert sum(last - first for first, last in reads) == wanted


@pytest.mark.parametrize("engram", ["host", "device", "sharded"])
def test_tables_hold_the_rows_of_the_file_in_whole_rows_and_zeros_behind_them(engram, stored):
    over = mesh(2, 2) if engram == "sharded" else None
    for layer, table in zip((1, 4), load_tables(Checkpoint("tiny"), engram, over), strict=True):
        for part in ("weight", "scale"):
            _, (rows, width), content = stored[f"layers.{layer}.engram.embed.{part}"]
            found = getattr(table, part)
            assert np.asarray(found).tobytes() == content + bytes((found.shape[0] - rows) * width)
            if engram == "sharded":
                assert found.shape[0] == -(-rows // 4) * 4
                assert {shard.data.shape for shard in found.addressable_shards} == {(found.shape[0] // 4, width)}
            else:
                assert found.shape == (rows, width)


def test_tables_of_an_earlier_load_are_taken_and_those_of_another_place_refused(reads):
    checkpoint, kept, seen = Checkpoint("tiny"), {}, []
    first = load_tables(checkpoint, "host", loaded=kept, on_progress=lambda *state: seen.append(state))
    assert [(done, total) for done, total, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [name for _, _, name in seen] == list(kept)
    before = len(reads)
    again = load_tables(checkpoint, "host", loaded=kept)
    assert len(reads) == before == 4
    assert all(a.weight is b.weight and a.scale is b.scale for a, b in zip(first, again, strict=True))
    with pytest.raises(ValueError, match=r"^loaded: layers\.1\.engram\.embed\.weight is [^\n]*$"):
        load_tables(checkpoint, "device", loaded=kept)


def test_unknown_place_and_a_split_without_a_mesh_are_refused_before_the_load(monkeypatch):
    monkeypatch.setattr(Checkpoint, "check", lambda *_: pytest.fail("headers were checked"))
    with pytest.raises(ValueError, match=r"^engram: 'disk' is not one of 'mmap', 'host', 'device', 'sharded'$"):
        Model.from_pretrained("tiny", engram="disk")
    with pytest.raises(ValueError, match=r"^engram: 'sharded' splits the tables over a mesh"):
        Model.from_pretrained("tiny", engram="sharded")


def sparse_checkpoint(directory: Path, cfg: Config) -> None:
    """A checkpoint of zeros that takes no disk, in eight files."""
    files: dict[str, dict] = {}
    for number, (name, tensor) in enumerate(expected_tensors(cfg).items()):
        files.setdefault(f"model-{number % 8}.safetensors", {})[name] = (tensor.dtype, tensor.shape)
    for file, tensors in files.items():
        write_shard(directory / file, tensors)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(cfg.json_text)


MEASURE = """
import jax, sys, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from dsv41_jax import Checkpoint
from dsv41_jax.files.load import load, load_tables

def memory(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0]) << 10

def begin_anew():
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark
    return memory("VmRSS:")

path, only = sys.argv[1], tuple(sys.argv[2:])
kept, held, excess = {}, 0, 0

def note(done, total, name):
    global held, excess
    held += sum(shard.data.nbytes for shard in kept[name].addressable_shards)
    excess = max(excess, memory("VmHWM:") - start - held)
    begin_anew()

checkpoint = Checkpoint(path)
mesh = None if only else jax.make_mesh((1, 4), ("data", "expert"))
jax.device_put(np.zeros(8), jax.devices()[-1])
start = begin_anew()
load(checkpoint, mesh, on_progress=note, loaded=kept, only=(lambda name: name.startswith(only)) if only else None)
grown = memory("VmRSS:") - start
before = begin_anew()
tables = None if only else load_tables(checkpoint, "host")
print(held, grown, excess, memory("VmHWM:") - before)
"""


def measure(directory: Path, *only: str) -> tuple[int, int, int, int]:
    """Of a load in a process of its own, in bytes: the parameters on all devices, what the process grew by, the most
    that it held beside the parameters so far, and what the Engram tables took in host memory."""
    run = [sys.executable, "-W", "error", "-c", MEASURE, str(directory), *only]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_host_holds_less_than_twice_the_largest_tensor_beside_the_parameters(tmp_path):  # whole shards staged in RAM
    cfg = small_config(
        hidden_size=1024, moe_intermediate_size=1024, n_routed_experts=16, vocab_size=16384, engram_layer_ids=[1],
        engram_num_embeddings=[300_000], engram_head_dim=256,
    )  # fmt: skip
    sparse_checkpoint(tmp_path, cfg)
    held, grown, excess, table = measure(tmp_path)
    largest = 16384 * 1024 * 2  # embedding and head
    assert held > 10 * largest  # of the experts a fourth on each device, of everything else all
    assert 0.95 * held < grown  # resident, not mapped: what is measured is all that there is
    assert excess < 2 * largest
    assert 300_000 * 264 < table < 1.2 * 300_000 * 264


@pytest.mark.slow
def test_two_full_width_layers_of_the_full_size_checkpoint_load_inside_24_gb(full):  # noqa: F811
    directory, files = full
    held, grown, excess, _ = measure(directory, "layers.2.", "layers.3.")
    stored_bytes = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
    wanted = sum(
        math.prod(shape) * stored_bytes[dtype]
        for tensors in files.values()
        for name, (dtype, shape) in tensors.items()
        if name.startswith(("layers.2.", "layers.3."))
    )
    assert held == wanted > 14_000_000_000
    assert 0.95 * held < grown
    assert excess < 2 * 129_280 * 5120 * 2  # the embedding, the largest tensor that a device gets
    assert grown + excess < 20_000_000_000
    print(f"parameters {held:,}, grown {grown:,}, beside them at most {excess:,}")


PROCESS = """
import jax, os, sys
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from dsv41_jax import Checkpoint
from dsv41_jax.files.load import load

read, true = 0, os.preadv

def preadv(*given):
    global read
    count = true(*given)
    read += count
    return count

os.preadv = preadv
params = load(Checkpoint("tiny"), jax.make_mesh((2, 2), ("expert", "data")))
print(read, *sorted({shard.index[0].start for shard in params.layers[0].ffn.experts.w1.weight[...].addressable_shards}))
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_only_its_experts(stored):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESS, address]
    runs = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for i in range(2)]
    try:
        said = [run.communicate(timeout=300)[0].split() for run in runs]
    finally:
        for run in runs:
            run.kill()
    sizes = {n: len(content) for n, (_, _, content) in stored.items() if not TABLES.match(n)}
    share = sum(size // 2 if ".experts." in name else size for name, size in sizes.items())
    assert said == [[str(share), "0"], [str(share), "3"]]
