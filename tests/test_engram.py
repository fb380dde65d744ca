"""Engram: layout, hashes and token map against the published numbers, rows and gates against the formulas."""

import math
import re
import shutil
import threading
import time
import tracemalloc
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, small_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dsv41_jax import Checkpoint, Config, ConfigError
from dsv41_jax.engine import chunks, ngrams
from dsv41_jax.engine.tables import EngramLookup, Table, rows_of_piece
from dsv41_jax.files.load import load_tables
from dsv41_jax.nn import engram
from dsv41_jax.numerics import numerics_by_name

# "Hello world, this is Engram.", position 0: token 19923 after nothing
FLASH_ROWS = [
    [4951095, 17647458, 42302169, 48904805, 79361896, 85395030, 104639378, 117997033, 128558709, 148782159, 169693850,
     182427107, 192644521, 215802445, 237100226, 252234365, 267666008, 287719094, 289664225, 315149546, 332329456,
     342383456, 355319627, 368232231], [9475024, 30819971, 38339747, 60023990],
]  # fmt: skip


def python_rows(ids: list[int | None], pad: int, layout: ngrams.Layout) -> list[list[int]]:
    """Rows of every position by big integers; None is an image."""
    multipliers, primes = layout.multipliers.tolist(), layout.primes.tolist()
    heads = len(primes) // (len(multipliers) - 1)
    rows = []
    for t in range(len(ids)):
        seen = [ids[t - s] if t >= s else None for s in range(len(multipliers))]
        first = seen.index(None) if None in seen else len(seen)
        seen = seen[:first] + [pad] * (len(seen) - first)
        r = seen[0] * multipliers[0]
        rows.append([])
        for n in range(1, len(seen)):
            r ^= seen[n] * multipliers[n]
            rows[-1] += [r % primes[c] + sum(primes[:c]) for c in range((n - 1) * heads, n * heads)]
    return rows


def read(memory: EngramLookup, tokens: object, state: tuple | None = None, ring: int = 8, **more: object):
    tokens = np.asarray(tokens, np.int32)
    start, history = state or (np.zeros(len(tokens), np.int32), np.full((len(tokens), ring), -1, np.int32))
    count = np.asarray(more.pop("count", [tokens.shape[1]] * len(tokens)), np.int32)
    rows, history = memory.read(tokens, count, start, history, **more)
    return np.stack([np.asarray(r.ids) for r in rows], axis=2), (start + count, history)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN["tiny-full"] / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny_memory(tokenizer) -> EngramLookup:
    return EngramLookup(Config.tiny(), ngrams.compressed_ids(tokenizer, Config.tiny()), Checkpoint("tiny").tables())


@pytest.fixture(scope="module")
def memory() -> EngramLookup:
    return EngramLookup.random(small_config())


@pytest.mark.parametrize(("slot", "rows", "first"), [(0, 384_006_168, 16_000_057), (1, 384_016_682, 16_000_477)])
def test_release_layout_has_the_published_primes_offsets_and_multipliers(slot, rows, first, units):
    layout = ngrams.layouts(Config.flash())[slot]
    primes = units["engram/release_primes_layer_ngram_head"][slot].ravel().tolist()
    assert layout.primes.tolist() == primes
    assert layout.offsets.tolist() == [sum(primes[:column]) for column in range(24)]
    assert layout.multipliers.tolist() == units["engram/multipliers_layers_1_14_ngram4_vocab99092"][slot].tolist()
    assert (layout.rows, primes[0]) == (rows, first)


def test_tiny_layout_takes_the_primes_that_nobody_has_taken(units):
    found = ngrams.layouts(Config.tiny())
    primes = [n for n in range(60, 200) if all(n % d for d in range(2, n))]
    assert [p for layout in found for p in layout.primes.tolist()] == primes[:12]
    np.testing.assert_array_equal(
        [x.multipliers for x in found], units["engram/multipliers_layers_1_4_ngram4_vocab248"]
    )


def test_primes_are_those_of_trial_division_and_of_the_published_lists():
    few = [n for n in range(-3, 20_000) if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))]
    assert [n for n in range(-3, 20_000) if ngrams.is_prime(n)] == few
    carmichael = [561, 1105, 1729, 294_409, 56_052_361, 118_901_521, 172_947_529]
    strong = [2047, 1_373_653, 25_326_001, 3_215_031_751, 2_152_302_898_747, 341_550_071_728_321]  # fool 2; 2, 3; ...
    squares = [p * p for p in (3, 41, 16_000_057, 2_147_483_647)]
    assert not any(map(ngrams.is_prime, carmichael + strong + squares))
    assert all(map(ngrams.is_prime, [2_147_483_647, 2**61 - 1, 10**16 + 61, 2**31 + 11]))


def test_primes_of_any_size_and_number_that_a_config_may_ask_for_come_at_once():  # trial division takes minutes
    cfg = small_config(engram_vocab_size=2**31 - 1, engram_n_heads=64)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"engram_num_embeddings: 434 for layer 1 is not \d+, the sum of its primes"):
        ngrams.layouts(cfg)
    assert time.monotonic() - begin < 5


def test_layout_that_does_not_fill_the_configured_rows_is_refused():  # another vocabulary gives other primes
    cfg = Config.tiny().replace(engram_num_embeddings=[434, 607])
    with pytest.raises(ConfigError, match=r"^text_config.engram_num_embeddings: .*607.*606[^\n]*$"):
        ngrams.layouts(cfg)


def test_published_rows_are_those_of_exactly_one_compressed_id():
    back = np.full((99_092, 1, 4), 2, np.int64)
    back[:, 0, 0] = np.arange(99_092)
    hits = []
    for layout, published in zip(ngrams.layouts(Config.flash()), FLASH_ROWS, strict=True):
        rows = ngrams.hash_rows(back, layout)[:, 0, : len(published)]
        hits.append(np.flatnonzero((rows == published).all(axis=-1)).tolist())
    assert len(hits[0]) == 1
    assert hits[0] == hits[1]


@pytest.mark.parametrize("slot", [0, 1])
def test_release_hash_equals_big_integers_whatever_jax_has(slot):  # JAX cuts 64-bit products to 32 bits
    rng = np.random.default_rng(slot)
    ids = rng.integers(0, 99_092, (4, 50)).astype(np.int32)
    ids[:, 10:14] = ids[:, 3::7] = 99_091
    layout = ngrams.layouts(Config.flash())[slot]
    for x64 in (False, True):
        with jax.enable_x64(x64):
            rows = ngrams.hash_rows(ngrams.look_back(ids, np.full((4, 3), -1, np.int32), 2), layout)
        assert rows.tolist() == [python_rows(row, 2, layout) for row in ids.tolist()]


def test_multipliers_beyond_53_bits_keep_every_bit():  # through a double they hash to other, valid rows
    primes = np.array([97, 101, 103], np.int64)
    layout = ngrams.Layout(np.array([2**53 + 1, 2**61 + 3, 2**60 + 1, 2**61 - 1]), primes, np.cumsum(primes) - primes)
    ids = np.random.default_rng(0).integers(0, 4, (1, 100)).astype(np.int32)
    rows = ngrams.hash_rows(ngrams.look_back(ids, np.full((1, 3), -1, np.int32), 2), layout)
    assert rows[0].tolist() == python_rows(ids[0].tolist(), 2, layout)


@pytest.mark.parametrize("case", ["b", "d"])
def test_hash_ids_equal_the_released_programs(case, tiny_memory):
    inputs, outputs = (np.load(GOLDEN["tiny-full"] / f"{name}.npz") for name in ("inputs", "outputs_float32"))
    length = int(inputs[f"{case}_prefill_len"])
    more = {"image": inputs["d_token_types"][:, :length] >= 0} if case == "d" else {}
    ids, _ = read(tiny_memory, inputs[f"{case}_ids"][:, :length], **more)
    np.testing.assert_array_equal(ids, outputs[f"{case}/engram_hash_ids"])


def test_look_back_is_blocked_by_the_start_and_by_an_image_and_stays_blocked():  # no token is not token 0
    ids = np.array([[-1, 5, 7, 8, 9], [4, -1, 6, 7, 8]], np.int32)
    back = ngrams.look_back(ids, np.array([[1, 2, 3], [-1, 2, 3]], np.int32), 99)
    assert back[0].tolist() == [[99] * 4, [5, 99, 99, 99], [7, 5, 99, 99], [8, 7, 5, 99], [9, 8, 7, 5]]
    assert back[1].tolist() == [[4, 3, 2, 99], [99] * 4, [6, 99, 99, 99], [7, 6, 99, 99], [8, 7, 6, 99]]


@pytest.mark.parametrize("bad", [-1, -288, 288, 129_280])
def test_model_refuses_a_token_outside_the_vocabulary_by_its_id(bad, small):  # JAX clamps or wraps silently
    with pytest.raises(ValueError, match=f"{bad} "):
        small.step(np.array([[5, bad, 7]]), small.init_cache(1, 16))


def test_lookup_of_a_token_outside_the_vocabulary_raises_or_counts_as_no_token(memory):  # -1 would wrap to the last
    try:
        ids, _ = read(memory, [[-1, 5, 7]])
    except (IndexError, ValueError):
        return
    assert ids[0, :, 0].tolist() == python_rows([None, 5, 7], 2, memory.layouts[0])


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [3, 1, 8], [2, 2, 2, 6], [11, 1]])
@pytest.mark.parametrize(("an_image", "ring"), [(False, 3), (True, 3), (True, 8)])
def test_chunks_that_carry_the_history_give_the_rows_of_one_call(chunks, an_image, ring, tiny_memory):
    tokens = np.random.default_rng(1).integers(8, 288, (2, 12)).astype(np.int32)
    image = np.arange(24).reshape(2, 12) == (4 if an_image else -1)
    mapped = np.where(image, -1, tiny_memory.token_map[tokens]).tolist()
    state, first, pieces = None, 0, []
    for size in chunks:
        part = slice(first, first + size)
        ids, state = read(tiny_memory, tokens[:, part], state, ring, image=image[:, part])
        pieces.append(ids)
        first += size
    joined = np.concatenate(pieces, axis=1)
    for slot, layout in enumerate(tiny_memory.layouts):
        rows = [python_rows([None if i < 0 else i for i in row], tiny_memory.pad, layout) for row in mapped]
        assert joined[:, :, slot].tolist() == rows


def continued(memory: EngramLookup, seen: list[int], then: list[int]) -> list[list[int]]:
    return python_rows([*seen, *then], memory.pad, memory.layouts[0])[len(seen) :]


def test_padding_on_the_right_does_not_enter_the_history(memory):  # pads hashed into the next chunk's rows
    first, second, third = np.random.default_rng(2).integers(8, 240, (3, 3, 6)).tolist()
    _, state = read(memory, second, read(memory, first)[1], count=[0, 2, 6])
    ids, _ = read(memory, third, state)
    seen = [first[0], first[1] + second[1][:2], first[2] + second[2]]
    assert ids[:, :, 0].tolist() == [continued(memory, *pair) for pair in zip(seen, third, strict=True)]


def test_reordered_and_shortened_rows_continue_as_if_decoded_from_scratch(memory):  # history left behind
    first, then = np.random.default_rng(3).integers(8, 240, (2, 2, 9)).tolist()
    _, (start, history) = read(memory, first)
    ids, _ = read(memory, then, (start - np.int32([0, 5]), history[::-1].copy()))
    assert ids[:, :, 0].tolist() == [continued(memory, first[1], then[0]), continued(memory, first[0][:4], then[1])]


def test_new_sequence_begins_with_pads_not_with_token_zero_or_the_last_sequence(memory):
    _, (_, stale) = read(memory, [[9, 10, 11, 12]])
    ids, _ = read(memory, [[20, 21, 22]], (np.zeros(1, np.int32), stale))
    assert ids[0, :, 0].tolist() == python_rows([20, 21, 22], 2, memory.layouts[0])


@pytest.mark.parametrize("layer_ids", [[1], [0, 1, 4]])
@pytest.mark.parametrize("length", [1, 13])
def test_first_and_second_call_agree_whatever_the_number_of_layers(layer_ids, length):
    primes = [n for n in range(60, 300) if all(n % d for d in range(2, n))]
    rows = [sum(primes[6 * slot : 6 * slot + 6]) for slot in range(len(layer_ids))]
    memory = EngramLookup.random(small_config(engram_layer_ids=layer_ids, engram_num_embeddings=rows))
    tokens = np.random.default_rng(4).integers(8, 240, (2, length)).astype(np.int32)
    (first, _), (second, _) = read(memory, tokens), read(memory, tokens)
    for slot, layout in enumerate(memory.layouts):
        rows = [python_rows(row, 2, layout) for row in tokens.tolist()]
        assert first[:, :, slot].tolist() == second[:, :, slot].tolist() == rows


def test_first_and_second_forward_of_a_model_agree(small):  # buffers sized by a list that fills later
    tokens = np.random.default_rng(5).integers(8, 240, (1, 13))
    np.testing.assert_array_equal(small(tokens).logits, small(tokens).logits, strict=True)


def test_tiny_map_equals_an_implementation_with_unicodedata(tiny_memory, tokenizer):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # byte-level BPE's alphabet
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    names = [tokenizer.id_to_token(i) for i in range(288)]
    texts = [n if i < 8 else bytes(alphabet[c] for c in n).decode("utf-8", "replace") for i, n in enumerate(names)]
    keys = [name if "\ufffd" in text else normalized(text) for name, text in zip(names, texts, strict=True)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    assert tiny_memory.token_map.tolist() == [numbers[key] for key in keys]
    assert len(numbers) == 248


def normalized(text: str) -> str:
    found = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    found = "".join(c for c in found if not unicodedata.category(c).startswith("M")).lower()
    found = re.sub(r"[ \t\r\n]+", " ", found)
    return (found if found == " " else found.strip()) or text


CLASSES = [
    ["a", "A", "á", "a\u0301", "Ａ", " a", "a ", "\tA\n", "a\u20dd", "ª"],  # \u20dd is an enclosing mark, Me
    ["\u0915", "\u0915\u093f", "\u0915\u0902"],  # \u093f is a spacing mark, Mc
    [" ", "  ", "\n", "\t \r\n", "\u00a0", "\u3000"],
    ["a b", "A\t\tB", " a \n b ", "a\u2003b"], ["fi", "ﬁ", "FI"], ["i", "İ", "I"], ["k", "\u212a"],
    ["\u0301"], ["\u0903"], ["\u20dd"], ["ß"], ["ss"], ["1", "¹", "①"], ["١"],
]  # fmt: skip


def test_tokens_of_equal_normalized_text_share_an_id_and_no_others_do():
    order = sorted((place, number, text) for number, texts in enumerate(CLASSES) for place, text in enumerate(texts))
    tokenizer = Tokenizer(WordLevel({text: i for i, (_, _, text) in enumerate(order)}, unk_token="ß"))
    cfg = Config.tiny().replace(vocab_size=len(order), engram_compressed_vocab_size=len(CLASSES))
    assert ngrams.compressed_ids(tokenizer, cfg).tolist() == [number for _, number, _ in order]


@pytest.mark.parametrize(("key", "given"), [("engram_compressed_vocab_size", 247), ("vocab_size", 289)])
def test_map_of_another_size_is_refused(key, given, tokenizer):  # ids past the map hash to valid-looking rows
    with pytest.raises(ConfigError, match=rf"^text_config.{key}: {given} [^\n]*(248|288)[^\n]*$"):
        ngrams.compressed_ids(tokenizer, Config.tiny().replace(**{key: given}))


def filled(cfg: Config, **values: np.ndarray) -> engram.Engram:
    module = engram.Engram(cfg)
    for name, value in values.items():
        leaf = getattr(module.wkv if name in ("weight", "scale") else module, name)
        leaf[...] = jnp.asarray(value, leaf[...].dtype)
    return module


def test_rows_decode_as_e4m3fn_with_one_scale_for_32_channels():  # a group of 128, or another E4M3, fits as well
    cfg = small_config(engram_head_dim=256)
    weight = np.zeros((5 * 32, 6 * 256), np.float32)
    column, group = np.mgrid[:6, :4]  # value channel 4 * column + group reads channel 64 * group + 32 of the row
    weight[4 * 32 + 4 * column + group, 256 * column + 64 * group + 32] = 1
    module = filled(cfg, weight=weight, scale=np.ones((5, 48), np.float32))
    scale = np.tile(np.arange(127, 135, dtype=np.uint8), (1, 1, 6, 1))
    ones, no_ids = jnp.full((1, 1, 6, 256), 0x38, jnp.uint8), jnp.zeros((1, 1, 6), jnp.int32)
    rows = engram.EngramRows(ones, jnp.asarray(scale), no_ids)
    out, _ = module(jnp.zeros((1, 1, 4, 32), jnp.float32), rows, None, eps=1e-20, numerics=numerics_by_name("float32"))
    decoded = np.asarray(out)[0, 0, :, :24].reshape(4, 6, 4) * (1 + np.exp(-1e-3))  # keys are zero: d = 0
    np.testing.assert_allclose(decoded, np.broadcast_to(np.float32([2, 8, 32, 128]), (4, 6, 4)), rtol=1e-6)


def test_only_the_rows_of_a_call_are_read_and_a_row_takes_264_bytes(tmp_path):  # flat offsets exceed 32 bits
    cfg = Config.flash().replace(engram_layer_ids=[1], engram_num_embeddings=[384_006_168])
    expected = python_rows([5_000, 77, 99_091, 2], 2, ngrams.layouts(cfg)[0])[3]
    weight = np.memmap(tmp_path / "weight", np.uint8, "w+", shape=(384_006_168, 256))  # 98 GB of holes
    scale = np.memmap(tmp_path / "scale", np.uint8, "w+", shape=(384_006_168, 8))
    weight[expected], scale[expected] = np.arange(24)[:, None], np.arange(24)[:, None] + 100
    memory = EngramLookup(cfg, np.arange(cfg.vocab_size, dtype=np.int32), (Table(weight, scale),))
    tracemalloc.start()
    (rows,), _ = memory.read(np.int32([[2]]), np.int32([1]), np.int32([3]), np.int32([[5_000, 77, 99_091]]))
    assert tracemalloc.get_traced_memory()[1] < 2**20  # the peak
    tracemalloc.stop()
    assert rows.ids.tolist() == [[expected]]
    assert rows.weight[0, 0, 0].nbytes + rows.scale[0, 0, 0].nbytes == 264
    np.testing.assert_array_equal(rows.weight[0, 0], np.tile(np.arange(24)[:, None], (1, 256)))
    np.testing.assert_array_equal(rows.scale[0, 0], np.tile(np.arange(24)[:, None] + 100, (1, 8)))


def test_last_rows_of_a_released_table_are_found_where_they_lie_in_the_file(tmp_path):
    table = np.memmap(tmp_path / "weight", np.uint8, "w+", shape=(384_006_168, 256))
    scale = np.memmap(tmp_path / "scale", np.uint8, "w+", shape=(384_006_168, 8))
    for path, width in (("weight", 256), ("scale", 8)):  # written by byte position: 384 million rows of so many bytes
        with (tmp_path / path).open("r+b") as file:
            for row, value in ((383_999_999, 7), (384_006_167, 9)):
                file.seek(row * width)
                file.write(bytes([value]) * width)
    at = np.array([[384_006_167, 383_999_999], [383_999_998, 0]])
    for found, width in zip(Table(table, scale).read(at), (256, 8), strict=True):
        np.testing.assert_array_equal(found, np.broadcast_to(np.array([[9, 7], [0, 0]])[..., None], (2, 2, width)))


def test_piece_of_a_table_answers_for_its_rows_of_piece_alone():  # ids below the piece read far outside it
    piece = jnp.asarray(np.arange(200, 400, 2, dtype=np.int32)[:, None].astype(np.uint8))  # rows 100..199
    found = rows_of_piece(piece, jnp.array([99, 100, 199, 200, 0, 2**31 - 1], jnp.int32), 100)
    assert found[:, 0].tolist() == [0, 200, 398 - 256, 0, 0, 0]


PLACES = {"mmap": None, "host": None, "device": None, "device on a mesh": (4, 1), "sharded": (2, 2)}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The bundled checkpoint with a NaN scale in row 431 of the 434 of its first table."""
    directory = tmp_path_factory.mktemp("damaged")
    shutil.copytree(GOLDEN["tiny-full"], directory, dirs_exist_ok=True)
    checkpoint = Checkpoint(directory)
    info = checkpoint.tensors["layers.1.engram.embed.scale"]
    with info.file.open("r+b") as file:
        file.seek(info.stop - 3)  # a scale a row
        file.write(b"\xff")
    return Checkpoint(directory)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_rows_of_the_file_and_refuses_a_nan_scale_by_its_row(place, damaged):
    over = None if PLACES[place] is None else jax.make_mesh(PLACES[place], ("data", "expert"))
    tables = load_tables(damaged, place.split()[0], over)
    rng = np.random.default_rng(8)
    for layer, rows, table in zip((1, 4), (434, 606), tables, strict=True):
        near = [0, 108, 109, 151, 152, 216, 217, 303, 304, 325, 326, rows - 2, rows - 1]  # where pieces of four meet
        at = np.concatenate([rng.integers(0, 430, 20), near])
        for found, part in zip(table.read(at.reshape(3, 11)), ("weight", "scale"), strict=True):
            raw = damaged.read(f"layers.{layer}.engram.embed.{part}").view(np.uint8)
            np.testing.assert_array_equal(found, raw[at].reshape(3, 11, -1))
    with pytest.raises(ValueError, match=r"^Engram table: row 431 has a scale of E8M0 byte 255"):
        tables[0].read(np.array([[5, 431]]))
    np.testing.assert_array_equal(
        tables[1].read(np.array([605]))[0], damaged.read("layers.4.engram.embed.weight")[[605]].view(np.uint8)
    )
    memory = EngramLookup(Config.tiny(), np.zeros(288, np.int32), tables)
    assert memory.on_host == (place in ("mmap", "host"))
    names = [f"layers.{layer}.engram.embed.{part}" for layer in (1, 4) for part in ("weight", "scale")]
    for found, name in zip(memory.sample(3)[-4:], names, strict=True):
        raw = damaged.read(name).view(np.uint8)
        np.testing.assert_array_equal(found, raw[[0, (len(raw) - 1) // 2, len(raw) - 1]])


@pytest.mark.parametrize("ahead", [True, False])
def test_rows_are_read_in_a_thread_beside_the_steps_only_where_that_is_asked_for(ahead):
    readers = []

    def read(tokens: np.ndarray, *_: object) -> None:
        readers.append((threading.get_ident() == threading.main_thread().ident, tokens.shape))

    parts = list(chunks.ahead(lambda place: read(np.ones(place, np.int32)) or place, chunks.cuts(1100), thread=ahead))
    assert readers == [(not ahead, part) for part in parts]
    assert parts == chunks.cuts(1100) and len(parts) == 3


def gate(x: object, key: object, q: object, k: object = 1.0) -> np.ndarray:
    x, key, q, k = (jnp.asarray(a, jnp.float32) for a in (x, key, q, np.broadcast_to(k, np.shape(q))))
    return np.asarray(engram.gates(x, key, q, k, eps=1e-20))


@pytest.mark.parametrize(("dot", "expected"), [(0.0, 0.50025), (1e-8, 0.50025), (9.0, 0.952574)])
@pytest.mark.parametrize("sign", [1, -1])
def test_gate_is_the_sigmoid_of_the_signed_root_with_its_floor_inside(dot, expected, sign):  # sign(0) gives 0.5
    expected = expected if sign > 0 else 1 - expected
    one = np.ones((1, 1, 1, 1))  # width 1: x and key are normalized to 1, and the dot is the weight
    assert gate(sign * one, one, np.full((1, 1), dot)).item() == pytest.approx(expected, abs=1e-6)


def test_gates_equal_the_formula_and_each_stream_is_normalized_alone():  # a joint norm couples the streams
    rng = np.random.default_rng(6)
    x, key = rng.standard_normal((2, 2, 3, 4, 64)).astype(np.float32)
    q, k = (rng.standard_normal((2, 4, 64)) * 2).astype(np.float32)
    rms = [np.sqrt((a.astype(np.float64) ** 2).mean(-1) + 1e-20) for a in (x, key)]
    d = (x.astype(np.float64) * q * k * key).sum(-1) / rms[0] / rms[1] / 8
    found = gate(x, key, q, k)
    # float32 sums of 64 terms: an error of 64 ulp of their sizes, and the root amplifies it near zero
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.sign(d) * np.sqrt(np.maximum(abs(d), 1e-6)))), atol=2e-5)
    louder = x * np.float32([1, 1, 100, 1])[:, None]
    np.testing.assert_array_equal(np.delete(gate(louder, key, q, k), 2, -1), np.delete(found, 2, -1))
    np.testing.assert_allclose(gate(louder, key, q, k)[..., 2], found[..., 2], atol=2e-5)


@pytest.mark.parametrize("x", [[0.0, 0.0], [-0.0, 0.0], [1.0, -1.0]])
def test_gradient_of_the_gate_is_finite_where_the_dot_is_zero(x):  # the root's slope at zero is infinite
    arrays = [jnp.asarray(a, jnp.float32) for a in ([[[x]]], [[[[1.0, 1.0]]]], [[1.0, 1.0]], [[1.0, 1.0]])]
    gradients = jax.grad(lambda *a: engram.gates(*a, eps=1e-20).sum(), argnums=(0, 1, 2, 3))(*arrays)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)


def test_module_equals_the_formula_and_every_ablation_is_seen(tiny_memory):  # greedy text hides a missing part
    rng, checkpoint = np.random.default_rng(7), Checkpoint("tiny")
    part = lambda name: checkpoint.read(f"layers.1.engram.{name}").astype(np.float64)  # noqa: E731
    block = np.repeat(np.repeat(part("wkv.scale"), 32, 0), 32, 1)
    tokens = rng.integers(8, 288, (2, 9)).astype(np.int32)
    x = rng.standard_normal((2, 9, 4, 96)).astype(np.float32)
    image = jnp.asarray(rng.random((2, 9)) < 0.2)
    (rows, others), _ = tiny_memory.read(tokens, np.int32([9, 9]), np.int32([0, 0]), np.full((2, 3), -1, np.int32))
    table = part("embed.weight") * np.repeat(part("embed.scale"), 32, 1)
    kv = table[np.asarray(rows.ids)].reshape(2, 9, -1) @ (part("wkv.weight") * block).T
    key, value = kv[..., : 4 * 96].reshape(2, 9, 4, 96), kv[..., None, 4 * 96 :]
    d = (x * part("q_weight") * part("k_weight") * key).sum(-1) * 96**-0.5
    d /= np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-20) * np.sqrt((key**2).mean(-1) + 1e-20)
    gate = 1 / (1 + np.exp(-np.sign(d) * np.sqrt(np.maximum(abs(d), 1e-6)))) * ~np.asarray(image)[..., None]
    wanted = x + gate[..., None] * value
    names = {"weight": "wkv.weight", "scale": "wkv.scale", "q_weight": "q_weight", "k_weight": "k_weight"}
    module = filled(Config.tiny(), **{name: part(path).astype(np.float32) for name, path in names.items()})
    out, _ = module(jnp.asarray(x), rows, image, eps=1e-20, numerics=numerics_by_name("float32"))
    np.testing.assert_allclose(out, wanted, atol=1e-4)
    zeros = engram.EngramRows(jnp.zeros_like(rows.weight), rows.scale, rows.ids)
    for ablation in (zeros, others):  # no table; rows by the other layer's seeds and primes, from its table
        assert (
            np.abs(
                np.asarray(module(jnp.asarray(x), ablation, image, eps=1e-20, numerics=numerics_by_name("float32"))[0])
                - wanted
            ).max()
            > 1e-2
        )
    assert np.abs(x - wanted).max() > 1e-2  # the layer skipped
