"""The released config.json: read whole, turned into the layer plan, and refused when a rule is broken."""

import copy
import hashlib
import json
import os
import pickle
import time
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import pytest
from conftest import GOLDEN, small_config

from dsv41_jax import Config, ConfigError
from dsv41_jax.config_rules import LIMITS, PRODUCTS

ROOT = Path(__file__).parent.parent
RELEASED = ROOT / "dsv41_jax/data/flash/config.json"
T, Q, V, Y = "text_config.", "quantization_config.", "vision_config.", "text_config.rope_scaling."


def flash_document() -> dict:
    return json.loads(RELEASED.read_text(encoding="utf-8"))


def put(document: dict, key: str, value: object) -> dict:
    """`document` with the dotted `key` set."""
    *sections, last = key.split(".")
    node = document
    for section in sections:
        node = node[section]
    node[last] = value
    return document


def drop(document: dict, key: str) -> dict:
    *sections, last = key.split(".")
    node = document
    for section in sections:
        node = node[section]
    del node[last]
    return document


def refused(document: object) -> str:
    """The one line with which `document` is refused."""
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(document)
    message = str(caught.value)
    assert "\n" not in message
    return message


def known_keys() -> list[str]:
    return [f.metadata["key"] for f in fields(Config) if "key" in f.metadata]


@pytest.fixture(scope="module")
def flash() -> Config:
    return Config.flash()


# ---------------------------------------------------------------------------------------------- the released file


def test_bundled_flash_config_is_the_released_file():
    content = RELEASED.read_bytes()
    assert len(content) == 3311
    assert hashlib.sha256(content).hexdigest() == "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"


FACTS = {
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264, "quant_method": "fp8",
    "weight_block_size": (32, 32), "scale_fmt": "ue8m0", "expert_dtype": "fp4", "vocab_size": 129280,
    "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
    "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 1048576, "rope_theta": 10000, "rope_type": "yarn",
    "yarn_factor": 16, "yarn_beta_fast": 32, "yarn_beta_slow": 1, "yarn_original_length": 65536,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3, "compress_rope_theta": 160000,
    "kv_source_layer_ids": (2, 8, 14, 20), "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
    "engram_layer_ids": (1, 14), "engram_num_embeddings": (384006168, 384016682), "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": (37, 38, 39), "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3, "vision_num_hidden_layers": 32,
    "vision_hidden_size": 1024, "vision_num_attention_heads": 16, "vision_intermediate_size": 2816,
    "vision_patch_size": 14, "vision_rope_theta": 10000, "vision_downsample_ratio": 3,
    "vision_max_image_tokens": 1024, "vision_min_pixels": 544 * 544, "vision_max_wh_ratio": None,
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_flash_field_has_the_released_value(name, flash):
    assert getattr(flash, name) == FACTS[name]


def test_flash_has_no_key_that_is_neither_used_nor_expected(flash):
    assert flash.unknown_keys == ()


@pytest.mark.parametrize("read", ["flash", "directory", "file", "dict"])
def test_every_way_to_read_gives_the_same_config_and_every_key_back(read, flash):
    cfg = {
        "flash": Config.flash,
        "directory": lambda: Config.from_pretrained(RELEASED.parent),
        "file": lambda: Config.from_pretrained(str(RELEASED)),
        "dict": lambda: Config.from_dict(flash_document()),
    }[read]()
    assert cfg == flash
    assert cfg.to_dict() == flash_document()


def test_unknown_keys_are_reported_and_survive_to_dict_and_replace():  # a key that nobody reads, dropped
    document = flash_document()
    document["new_section"] = {"inner": [1, {"deep": "ü"}]}
    document["text_config"]["later_feature"] = None
    document["vision_config"]["later_size"] = 7
    cfg = Config.from_dict(document)
    assert set(cfg.unknown_keys) == {"new_section.inner", "text_config.later_feature", "vision_config.later_size"}
    assert cfg.to_dict() == document
    changed = cfg.replace(index_topk=256)
    assert changed.to_dict() == put(document, T + "index_topk", 256)


def test_quantization_is_found_at_the_outer_level_only():  # readers of text_config alone take the weights for bf16
    document = flash_document()
    document["text_config"]["quantization_config"] = document.pop("quantization_config")
    assert refused(document).startswith("quantization_config.")


# --------------------------------------------------------------------------------------------------- the layer plan


def latest(sources: tuple[int, ...], layer: int) -> int:
    return [s for s in sources if s <= layer][-1]


def test_flash_plan_has_two_window_four_full_four_reindex_and_thirty_reuse_layers(flash):
    plan = flash.layers
    ids = {mode: [p.id for p in plan if p.mode == mode] for mode in ("window", "full", "reindex", "reuse")}
    assert [p.id for p in plan] == list(range(40))
    assert ids["window"] == [0, 1]
    assert ids["full"] == [2, 8, 14, 20]
    assert ids["reindex"] == [24, 28, 32, 36]
    assert len(ids["reuse"]) == 30


@pytest.mark.parametrize("layer", range(40))
def test_flash_layer_reads_the_latest_sources_at_or_below_it(layer, flash):
    plan = flash.layers[layer]
    window = layer < 2
    assert plan.ratio == (0 if window else 2 if layer < 20 else 1)
    assert plan.kv_source == (None if window else latest((2, 8, 14, 20), layer))
    assert plan.index_source == (None if window else latest((2, 8, 14, 20, 24, 28, 32, 36), layer))
    assert plan.owns_kv == (layer in (2, 8, 14, 20))
    assert plan.owns_indexer == (layer in (2, 8, 14, 20, 24, 28, 32, 36))
    assert plan.publishes_candidates == (layer == 20)
    assert plan.obeys_candidates == (layer in (24, 28, 32, 36))
    assert plan.engram_slot == {1: 0, 14: 1}.get(layer)
    assert plan.draft_feature == (layer in (37, 38, 39))


def test_derived_sizes_of_flash(flash):
    assert (flash.expanded_heads, flash.engram_columns, flash.has_vision) == (32768, 24, True)
    assert flash.candidate_topk_blocks * flash.candidate_block_size == 16384


def test_no_candidate_source_means_nobody_publishes_or_obeys():
    plan = small_config(candidate_source_layer_id=None).layers
    assert not any(p.publishes_candidates or p.obeys_candidates for p in plan)


@pytest.mark.parametrize(("length", "accepted"), [(39, False), (40, True), (41, False), (42, False), (43, True)])
def test_ratio_list_covers_the_layers_or_layers_and_drafts(length, accepted, flash):  # drafts' ratios stand at the end
    document = flash_document()
    ratios = document["text_config"]["compress_ratios"]
    document["text_config"]["compress_ratios"] = ratios[:length]
    if accepted:
        assert Config.from_dict(document).layers == flash.layers
    else:
        message = refused(document)
        assert message.startswith("text_config.compress_ratios: ")
        assert str(length) in message


# ------------------------------------------------------------------------------------------------------ refused ones

RATIOS = [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
BROKEN = [
    (T + "hidden_size", "5120"), (T + "hidden_size", True), (T + "hidden_size", 5120.0), (T + "hidden_size", None),
    (T + "hidden_size", [5120]), (T + "hidden_size", 0), (T + "hidden_size", -5120), (T + "hidden_size", 5100),
    (T + "num_hidden_layers", False), (T + "num_hidden_layers", 0), (T + "norm_topk_prob", 1),
    (T + "swiglu_limit", "10"), (T + "swiglu_limit", True), (T + "rms_norm_eps", float("nan")),
    (T + "rms_norm_eps", float("inf")), (T + "rms_norm_eps", -1e-20), (T + "rms_norm_eps", 0), (T + "hc_eps", -1e-06),
    (T + "hc_eps", float("nan")), (T + "rope_theta", float("-inf")), (T + "compress_rope_theta", 0),
    (T + "rope_theta", 10**400), (V + "rope_theta", float("nan")),
    (Y + "factor", float("nan")), (Y + "rope_type", "linear"), (Y + "original_max_position_embeddings", 0),
    (T + "compress_ratios", [*RATIOS[:5], 3, *RATIOS[6:]]), (T + "compress_ratios", [*RATIOS[:5], -1, *RATIOS[6:]]),
    (T + "compress_ratios", [*RATIOS[:5], 2.0, *RATIOS[6:]]), (T + "compress_ratios", 2),
    (T + "compress_ratios", [*RATIOS[:42], 1]),
    (T + "compress_ratios", [*RATIOS[:10], 1, *RATIOS[11:]]),  # a consumer whose ratio is not its source's
    (T + "compress_ratios", [*RATIOS[:25], 2, *RATIOS[26:]]),
    (T + "kv_source_layer_ids", [8, 2, 14, 20]), (T + "kv_source_layer_ids", [2, 2, 8, 14, 20]),
    (T + "kv_source_layer_ids", [2, 8, 14, 20, 40]), (T + "kv_source_layer_ids", [-1, 2, 8, 14, 20]),
    (T + "kv_source_layer_ids", [2, 8, 14, 20, 21]),  # not an index source
    (T + "kv_source_layer_ids", [8, 14, 20]), (T + "kv_source_layer_ids", []),  # nothing below layers 2..7
    (T + "index_source_layer_ids", [0, 2, 8, 14, 20, 24, 28, 32, 36]),  # a window layer
    (T + "index_source_layer_ids", [2, 8, 14, 20, 24, 28, 36, 32]),
    (T + "index_source_layer_ids", [2, 8, 14, 20, 24, 28, 32, 36, 40]),
    (T + "candidate_source_layer_id", 21), (T + "candidate_source_layer_id", "20"),
    (T + "candidate_topk_blocks", 64),  # 63 blocks of 8 and the newest entry: 505 < 512
    (T + "candidate_block_size", 0), (T + "index_topk", 0), (T + "index_topk", -1), (T + "index_head_dim", 100),
    (T + "o_groups", 7), (T + "o_groups", 0), (T + "qk_rope_head_dim", 63), (T + "qk_rope_head_dim", 130),
    (T + "num_experts_per_tok", 385), (T + "num_experts_per_tok", 0), (T + "n_shared_experts", 2),
    (T + "num_key_value_heads", 2), (T + "hidden_act", "gelu"), (T + "scoring_func", "softmax"),
    (T + "topk_method", "greedy"), (T + "norm_topk_prob", False), (T + "tie_word_embeddings", True),
    (T + "attention_bias", True), (T + "sliding_window", 0), (T + "hc_mult", 0), (T + "hc_sinkhorn_iters", 0),
    (T + "engram_pad_token_id", 129280), (T + "engram_layer_ids", [1, 40]), (T + "engram_layer_ids", [14, 1]),
    (T + "engram_num_embeddings", [384006168]), (T + "engram_max_ngram_size", 1), (T + "engram_head_dim", 100),
    (T + "engram_compressed_vocab_size", 0), (T + "dspark_noise_token_id", 129280),
    (T + "dspark_target_layer_ids", [37, 38, 40]), (T + "dspark_target_layer_ids", []),
    (T + "dspark_num_experts_per_tok", 129), (T + "dspark_block_size", 0), (T + "num_nextn_predict_layers", -1),
    (V + "num_attention_heads", 15), (V + "patch_size", 0), (V + "num_hidden_layers", -1), (V + "hidden_size", "1024"),
    (Q + "expert_dtype", "fp8"), (Q + "expert_dtype", None), (Q + "scale_fmt", "float"), (Q + "quant_method", "awq"),
    (Q + "weight_block_size", [128, 128]), (Q + "weight_block_size", [32]), (Q + "weight_block_size", 32),
    ("bos_token_id", -1), ("eos_token_id", 129280), ("pad_token_id", 10**12), ("image_token_id", 129280),
]  # fmt: skip


def shown(value: object) -> str:
    """How a value stands in a message; lists may be shown as tuples."""
    return ", ".join(map(repr, value)) if isinstance(value, list) else repr(value)


@pytest.mark.parametrize(("key", "value"), BROKEN, ids=lambda part: str(part).replace(" ", "")[:60])
def test_broken_value_is_refused_in_one_line_with_its_key_and_value(key, value):
    message = refused(put(flash_document(), key, value))
    assert message.startswith(key + ": ")
    assert shown(value) in message


MISSING = [
    T + "hidden_size", T + "compress_ratios", T + "candidate_source_layer_id", Y + "rope_type", V + "max_wh_ratio",
    Q + "expert_dtype", Q + "scale_fmt", Q + "weight_block_size", "image_token_id",
]  # fmt: skip


@pytest.mark.parametrize("key", MISSING)
def test_missing_key_is_refused_by_its_name(key):  # a silent default is another model
    message = refused(drop(flash_document(), key))
    assert message.startswith(key + ": ")
    assert "missing" in message


@pytest.mark.parametrize("section", ["text_config", "vision_config", "quantization_config", "text_config.rope_scaling"])
@pytest.mark.parametrize("value", [None, [], "fp8", 3])
def test_section_that_is_no_object_is_refused_by_its_name(section, value):
    assert refused(put(flash_document(), section, value)).startswith(section)


@pytest.mark.parametrize("document", [[], [1, 2], "text", None])
def test_json_that_is_no_object_is_refused(document, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        Config.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert repr(document) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe\x00{", b"{}{}", b"[" * 100_000])
def test_file_that_is_not_json_is_refused_by_its_path(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.from_pretrained(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message


@pytest.mark.parametrize("path", ["", "config.json", "absent"])
def test_missing_file_is_refused_by_its_path(path, tmp_path):
    with pytest.raises(ConfigError) as caught:
        Config.from_pretrained(tmp_path / path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_smallest_candidate_budget_that_can_always_hold_topk_is_accepted(flash):  # too few entries for the top-k
    kept = flash.replace(candidate_topk_blocks=65)
    assert kept.candidate_topk_blocks * kept.candidate_block_size == 520


# ------------------------------------------------------------------------- limits, and all problems in one short line

TOO_MUCH = [
    (T + "n_routed_experts", 10**8), (T + "num_hidden_layers", 10**7), (T + "num_nextn_predict_layers", 10**7),
    (V + "num_hidden_layers", 10**7), (T + "dspark_n_routed_experts", 10**8), (T + "vocab_size", 10**9),
    (T + "engram_vocab_size", 10**16), (T + "engram_n_heads", 10**6), (T + "engram_max_ngram_size", 10**6),
    (T + "sliding_window", 10**12), (T + "hidden_size", 2**40), (T + "hc_mult", 10**6),
    (T + "hc_sinkhorn_iters", 10**9), (T + "max_position_embeddings", 2**31), (T + "dspark_block_size", 10**9),
    (T + "engram_num_embeddings", [2**31, 5]), (T + "engram_num_embeddings", [-5, 5]), (V + "patch_size", 10**6),
    (T + "n_routed_experts", 16384),  # in 40 layers: four million tensors
    (T + "engram_layer_ids", list(range(10**5))),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), TOO_MUCH, ids=lambda part: str(part).replace(" ", ""))
def test_number_that_asks_for_hours_or_all_memory_is_refused_at_once(key, value):
    begin, document = time.monotonic(), put(flash_document(), key, value)
    message = refused(document)
    assert key in message
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_numbers_that_are_allowed_each_is_refused(name, flash):  # an axis of 2**40, millions of primes
    others, most = PRODUCTS[name]
    most = {"num_attention_heads": 1 << 19} | {one: min(LIMITS[one], 1 << 19) for one in (name, *others)}
    with pytest.raises(ConfigError) as caught:
        flash.replace(**most)
    assert any(f".{name.removeprefix('vision_')}: " in one and " times " in one for one in caught.value.problems)


def test_every_limit_is_at_least_eight_times_the_release(flash):
    for name, most in LIMITS.items():
        assert getattr(flash, name) * 8 <= most, name
    for name, (others, most) in PRODUCTS.items():
        assert getattr(flash, name) * prod(getattr(flash, other) for other in others) * 8 <= most, name


def test_all_problems_are_told_at_once_each_key_once_and_none_is_made_up():
    wrong = {
        T + "hidden_size": "7", T + "index_topk": 0, T + "o_groups": 0, T + "kv_source_layer_ids": [8, 2],
        V + "patch_size": -1, Q + "scale_fmt": "float", "eos_token_id": 129280,
    }  # fmt: skip
    document = flash_document()
    for key, value in wrong.items():
        put(document, key, value)
    drop(document, T + "rms_norm_eps")
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(document)
    problems = caught.value.problems
    assert sorted(problem.split(": ")[0] for problem in problems) == sorted([*wrong, T + "rms_norm_eps"])
    assert str(caught.value) == "; ".join(problems)


def test_many_problems_are_cut_in_the_line_and_kept_as_a_tuple():
    document = flash_document()
    document["text_config"] = {}
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(document)
    problems = caught.value.problems
    assert len(problems) == sum(key.startswith(T) for key in known_keys()) - 1  # one of them has a default
    assert str(caught.value) == "; ".join([*problems[:8], f"and {len(problems) - 8} more"])


def test_long_values_are_not_repeated():
    assert len(refused(put(flash_document(), T + "compress_ratios", [3] * 10**6))) < 1000
    assert len(refused(put(flash_document(), T + "hidden_act", "x" * 10**6))) < 1000
    assert len(refused([0] * 10**6)) < 1000
    assert len(refused(put(flash_document(), T + "index_topk", -(10**4000)))) < 1000


def nested(depth: int) -> dict:
    document: dict = {}
    for _ in range(depth):
        document = {"a": document}
    return document


@pytest.mark.parametrize(
    "value", [nested(200_000), object(), {1, 2}, 10**5000], ids=["deep", "object", "set", "digits"]
)
def test_what_json_cannot_hold_is_refused(value):
    assert refused(flash_document() | {"extra": value}).startswith("config: is not what JSON can hold")


def test_a_key_that_stands_twice_is_refused(tmp_path):  # which of them is meant?
    text = RELEASED.read_text().replace('"index_topk": 512,', '"index_topk": 512, "index_topk": 256,')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="names index_topk more than once"):
        Config.from_pretrained(tmp_path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(6 << 30)


@pytest.mark.parametrize("make", [fifo, device, sparse])
def test_a_file_that_never_ends_is_not_read(make, tmp_path):
    make(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"cannot be read .(not a regular file|6442450944 bytes, more than)"):
        Config.from_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------- validation, replace, value


def test_the_dataclass_functions_validate_and_keep_every_key(flash):  # to_dict told the old number
    document = put(flash_document(), "later", {"inner": 1})
    changed = replace(Config.from_dict(document), index_topk=256, yarn_factor=4.0, window_only_layer_ids=(2,))
    wanted = put(put(put(document, T + "index_topk", 256), Y + "factor", 4.0), T + "window_only_layer_ids", [2])
    assert changed.to_dict() == wanted
    assert Config.from_dict(changed.to_dict()) == changed
    assert replace(flash).json_text == flash.json_text
    with pytest.raises(ConfigError, match=r"^text_config.hidden_size: 7 is not a multiple"):
        replace(flash, hidden_size=7)
    values = {f.name: getattr(flash, f.name) for f in fields(flash) if f.name != "json_text"}
    made = Config(json_text="{}", **values)
    assert made == flash and Config.from_dict(made.to_dict()) == flash
    with pytest.raises(ConfigError, match=r"^bos_token_id: -1 is not a token id"):
        Config(json_text="{}", **values | {"bos_token_id": -1})
    for text in ("[]", "{", '{"text_config": 3}'):
        with pytest.raises(ConfigError):
            Config(json_text=text, **values)
    for other in (copy.copy(changed), pickle.loads(pickle.dumps(changed))):
        assert other == changed and other.to_dict() == wanted


def test_bundled_configs_take_changes_and_tiny_has_a_name(flash):
    assert Config.flash(index_topk=256) == flash.replace(index_topk=256)
    assert Config.tiny(eos_token_id=7).to_dict()["eos_token_id"] == 7
    assert Config.from_pretrained("tiny") == Config.tiny()
    with pytest.raises(ConfigError, match="no_such_field"):
        Config.tiny(no_such_field=1)


def test_repr_is_a_line_that_names_the_sizes(flash):
    assert repr(flash) == (
        "Config(40 layers, width 5120, 64 heads of 512, 6 of 384 experts, vocabulary 129280, 1048576 positions, "
        "Engram in 2 layers, 3 draft stages, vision of 32 layers)"
    )
    assert "Engram" not in repr(small_config(engram_layer_ids=[], engram_num_embeddings=[]))


@pytest.mark.parametrize("directory", [RELEASED.parent, *GOLDEN.values()], ids=lambda path: path.name)
def test_bundled_and_golden_configs_are_accepted(directory):
    cfg = Config.from_pretrained(directory)
    document = json.loads((directory / "config.json").read_text())
    assert len(cfg.layers) == document["text_config"]["num_hidden_layers"]
    assert cfg.unknown_keys == ()


def test_architectures_and_fmt_are_not_asserted(flash):
    document = flash_document()
    document["architectures"] = ["SomethingElse"]
    document["quantization_config"]["fmt"] = "e4m3"
    assert Config.from_dict(document).layers == flash.layers


def test_replace_changes_the_field_and_its_key_and_leaves_the_original(flash):
    cfg = flash
    changed = cfg.replace(rms_norm_eps=1e-6, yarn_factor=4)
    assert (changed.rms_norm_eps, changed.yarn_factor) == (1e-6, 4)
    assert changed.to_dict()["text_config"]["rope_scaling"]["factor"] == 4
    assert (cfg.rms_norm_eps, cfg.yarn_factor) == (1e-20, 16)
    assert cfg.to_dict() == flash_document()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": 0}, ["text_config.index_topk", "0"]),
        ({"hidden_size": 5100}, ["text_config.hidden_size", "5100"]),
        ({"kv_source_layer_ids": (8, 14, 20)}, ["text_config.kv_source_layer_ids", "8, 14, 20"]),
        ({"no_such_field": 3}, ["no_such_field", "3"]),
        ({"json_text": "{}"}, ["json_text"]),
    ],
)
def test_replace_validates(changes, words, flash):
    with pytest.raises(ConfigError) as caught:
        flash.replace(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)


def test_config_is_hashable_and_equal_by_value():
    cfg, again = Config.flash(), Config.from_dict(copy.deepcopy(flash_document()))
    assert cfg is not again
    assert cfg == again
    assert hash(cfg) == hash(again)
    assert cfg.replace(index_topk=512) == cfg
    assert cfg.replace(index_topk=256) != cfg
    assert {cfg: "flash", Config.tiny(): "tiny"}[again] == "flash"
    with pytest.raises(AttributeError):
        cfg.index_topk = 3
