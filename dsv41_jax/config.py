"""The released `config.json`, read whole, checked, and turned into a layer plan.

Dimension key, used unchanged in every annotation, einsum and comment of this library:

    B batch                 T tokens of this call     S compressed entries      W window
    C entries kept by the   D width                   N heads                   H head width
      indexer               R its rotary part         Q query rank              I index heads
    J index head width      G output groups           O output rank             E experts
    A experts per token     F expert width            M residual streams        L layers
    V vocabulary            P patches

Parameters carry the names of their axes, in lower case and one word each, for whoever places them on a mesh:
`vocab width heads rank groups experts routes hidden streams coefficients index latent ngram patch`.

Words, one meaning each: a (batch) row is one sequence of a batch; an entry is compressed main KV and its index key; a
ring is a cache by position; a table row is Engram's; a chunk is the part of a call that one run takes, a bucket the
width that it is padded to; shared is what source layers hand to the layers above; a tap is an intermediate by its name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

HUGE = 1e300  # JSON spells infinity as a number too large for a float
WINDOW, FULL, REINDEX, REUSE = "window", "full", "reindex", "reuse"


class ConfigError(ValueError):
    """A config breaks a rule; the message is one line that names the key, the value and the rule."""


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: {value!r} {rule}")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What layer `id` is (paper 2.3; config keys `compress_ratios`, `*_source_layer_ids`).

    `mode` is one of window, full, reindex, reuse. `ratio` is tokens per compressed entry, and with it the rotary
    frequencies of the layer (0: those of a window layer). `kv_source` and `index_source` are the layers whose main KV
    and whose selected ids this layer reads; None: its attention sees the window alone, whatever it publishes.
    `engram_slot` counts Engram layers from 0. Of `experts` routed experts `experts_per_token` are active.
    """

    id: int
    mode: str
    ratio: int
    experts: int
    experts_per_token: int
    kv_source: int | None = None
    index_source: int | None = None
    publishes_candidates: bool = False
    obeys_candidates: bool = False
    engram_slot: int | None = None
    draft_feature: bool = False

    @property
    def owns_kv(self) -> bool:
        return self.mode == FULL

    @property
    def owns_indexer(self) -> bool:
        return self.mode in (FULL, REINDEX)


def _key(path: str, **optional: Any) -> Any:
    """A field of this key; `default=` is for a key that a file need not have."""
    return field(metadata={"key": path} | optional)


_TEXT, _YARN, _VISION, _QUANT = "text_config.", "text_config.rope_scaling.", "vision_config.", "quantization_config."


@dataclass(frozen=True, kw_only=True)
class Config:
    """The architecture as flat data. A field is named after its key; `json_text` keeps the file's every key.

    Build one with `from_pretrained`, `from_dict`, `flash` or `tiny`, and a changed copy with `replace`: each
    validates. Source: the released config.json; the rules are those of the architecture (paper 2.2 to 2.4).

    >>> cfg = Config.flash()
    >>> [layer.id for layer in cfg.layers if layer.mode == "full"], cfg.layers[24].mode, cfg.layers[23].index_source
    ([2, 8, 14, 20], 'reindex', 20)
    >>> cfg.replace(index_topk=0)
    Traceback (most recent call last):
    dsv41_jax.config.ConfigError: text_config.index_topk: 0 is not at least 1
    """

    json_text: str = field(compare=False)
    bos_token_id: int = _key("bos_token_id")
    eos_token_id: int = _key("eos_token_id")
    pad_token_id: int = _key("pad_token_id")
    image_token_id: int = _key("image_token_id")
    quant_method: str = _key(_QUANT + "quant_method")
    weight_block_size: tuple[int, ...] = _key(_QUANT + "weight_block_size")
    scale_fmt: str = _key(_QUANT + "scale_fmt")
    expert_dtype: str = _key(_QUANT + "expert_dtype")
    vocab_size: int = _key(_TEXT + "vocab_size")
    hidden_size: int = _key(_TEXT + "hidden_size")
    moe_intermediate_size: int = _key(_TEXT + "moe_intermediate_size")
    num_hidden_layers: int = _key(_TEXT + "num_hidden_layers")
    num_attention_heads: int = _key(_TEXT + "num_attention_heads")
    num_key_value_heads: int = _key(_TEXT + "num_key_value_heads")
    head_dim: int = _key(_TEXT + "head_dim")
    qk_rope_head_dim: int = _key(_TEXT + "qk_rope_head_dim")
    q_lora_rank: int = _key(_TEXT + "q_lora_rank")
    o_lora_rank: int = _key(_TEXT + "o_lora_rank")
    o_groups: int = _key(_TEXT + "o_groups")
    hidden_act: str = _key(_TEXT + "hidden_act")
    swiglu_limit: float = _key(_TEXT + "swiglu_limit")
    rms_norm_eps: float = _key(_TEXT + "rms_norm_eps")
    attention_bias: bool = _key(_TEXT + "attention_bias")
    tie_word_embeddings: bool = _key(_TEXT + "tie_word_embeddings")
    max_position_embeddings: int = _key(_TEXT + "max_position_embeddings")
    rope_theta: float = _key(_TEXT + "rope_theta")
    rope_type: str = _key(_YARN + "rope_type")
    yarn_factor: float = _key(_YARN + "factor")
    yarn_beta_fast: float = _key(_YARN + "beta_fast")
    yarn_beta_slow: float = _key(_YARN + "beta_slow")
    yarn_original_length: int = _key(_YARN + "original_max_position_embeddings")
    n_routed_experts: int = _key(_TEXT + "n_routed_experts")
    n_shared_experts: int = _key(_TEXT + "n_shared_experts")
    num_experts_per_tok: int = _key(_TEXT + "num_experts_per_tok")
    scoring_func: str = _key(_TEXT + "scoring_func")
    topk_method: str = _key(_TEXT + "topk_method")
    norm_topk_prob: bool = _key(_TEXT + "norm_topk_prob")
    routed_scaling_factor: float = _key(_TEXT + "routed_scaling_factor")
    sliding_window: int = _key(_TEXT + "sliding_window")
    compress_ratios: tuple[int, ...] = _key(_TEXT + "compress_ratios")
    compress_rope_theta: float = _key(_TEXT + "compress_rope_theta")
    window_only_layer_ids: tuple[int, ...] = _key(_TEXT + "window_only_layer_ids", default=())  # no key of the release
    kv_source_layer_ids: tuple[int, ...] = _key(_TEXT + "kv_source_layer_ids")
    index_source_layer_ids: tuple[int, ...] = _key(_TEXT + "index_source_layer_ids")
    index_n_heads: int = _key(_TEXT + "index_n_heads")
    index_head_dim: int = _key(_TEXT + "index_head_dim")
    index_topk: int = _key(_TEXT + "index_topk")
    candidate_source_layer_id: int | None = _key(_TEXT + "candidate_source_layer_id")
    candidate_topk_blocks: int = _key(_TEXT + "candidate_topk_blocks")
    candidate_block_size: int = _key(_TEXT + "candidate_block_size")
    hc_mult: int = _key(_TEXT + "hc_mult")
    hc_sinkhorn_iters: int = _key(_TEXT + "hc_sinkhorn_iters")
    hc_eps: float = _key(_TEXT + "hc_eps")
    engram_layer_ids: tuple[int, ...] = _key(_TEXT + "engram_layer_ids")
    engram_num_embeddings: tuple[int, ...] = _key(_TEXT + "engram_num_embeddings")
    engram_max_ngram_size: int = _key(_TEXT + "engram_max_ngram_size")
    engram_vocab_size: int = _key(_TEXT + "engram_vocab_size")
    engram_n_heads: int = _key(_TEXT + "engram_n_heads")
    engram_head_dim: int = _key(_TEXT + "engram_head_dim")
    engram_pad_token_id: int = _key(_TEXT + "engram_pad_token_id")
    engram_compressed_vocab_size: int = _key(_TEXT + "engram_compressed_vocab_size")
    num_nextn_predict_layers: int = _key(_TEXT + "num_nextn_predict_layers")
    dspark_block_size: int = _key(_TEXT + "dspark_block_size")
    dspark_noise_token_id: int = _key(_TEXT + "dspark_noise_token_id")
    dspark_target_layer_ids: tuple[int, ...] = _key(_TEXT + "dspark_target_layer_ids")
    dspark_markov_rank: int = _key(_TEXT + "dspark_markov_rank")
    dspark_n_routed_experts: int = _key(_TEXT + "dspark_n_routed_experts")
    dspark_num_experts_per_tok: int = _key(_TEXT + "dspark_num_experts_per_tok")
    vision_num_hidden_layers: int = _key(_VISION + "num_hidden_layers")
    vision_hidden_size: int = _key(_VISION + "hidden_size")
    vision_num_attention_heads: int = _key(_VISION + "num_attention_heads")
    vision_intermediate_size: int = _key(_VISION + "intermediate_size")
    vision_patch_size: int = _key(_VISION + "patch_size")
    vision_rope_theta: float = _key(_VISION + "rope_theta")
    vision_downsample_ratio: int = _key(_VISION + "downsample_ratio")
    vision_max_image_tokens: int = _key(_VISION + "max_image_tokens")
    vision_min_pixels: int = _key(_VISION + "min_pixels")
    vision_max_wh_ratio: float | None = _key(_VISION + "max_wh_ratio")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Config:
        """Read `config.json` (or the directory that holds it)."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON ({error})") from None
        return cls.from_dict(document)

    @classmethod
    def from_dict(cls, document: object) -> Config:
        """Check a nested config (the released layout) and flatten it; unknown keys are kept in `json_text`."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"config: {document!r} is not a JSON object")
        values = {f.name: _lookup(document, f.metadata, str(f.type)) for f in _KEYED}
        config = cls(json_text=json.dumps(document, ensure_ascii=False), **values)
        _validate(config)
        return config

    @classmethod
    def flash(cls) -> Config:
        """DeepSeek-V4.1-Flash as released on 2026-09-10."""
        return cls.from_dict(json.loads(resources.files("dsv41_jax").joinpath("data/flash/config.json").read_text()))

    @classmethod
    def tiny(cls) -> Config:
        """The bundled checkpoint's config: eight layers, every feature on."""
        return cls.from_dict(json.loads(resources.files("dsv41_jax").joinpath("data/tiny/config.json").read_text()))

    def to_dict(self) -> dict[str, Any]:
        """The nested config, unknown keys included."""
        return json.loads(self.json_text)

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, validated again."""
        document = self.to_dict()
        keys = {f.name: f.metadata["key"] for f in _KEYED}
        for name, value in changes.items():
            _require(name in keys, name, value, "is set, but there is no such field")
            *sections, last = keys[name].split(".")
            functools.reduce(lambda node, section: node[section], sections, document)[last] = value
        return self.from_dict(document)

    @functools.cached_property
    def unknown_keys(self) -> tuple[str, ...]:
        """Dotted keys of the file that this library neither uses nor expects."""
        known = {f.metadata["key"] for f in _KEYED} | _EXPECTED_UNUSED
        return tuple(key for key in _leaves(self.to_dict()) if key not in known)

    @functools.cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan of the L backbone layers."""
        return tuple(_plan(self, layer) for layer in range(self.num_hidden_layers))

    @functools.cached_property
    def draft_stages(self) -> tuple[LayerPlan, ...]:
        """The plan of the drafter's blocks: window layers with experts of their own, numbered on from the backbone."""
        experts, active = self.dspark_n_routed_experts, self.dspark_num_experts_per_tok
        numbers = range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)
        return tuple(LayerPlan(id=n, mode=WINDOW, ratio=0, experts=experts, experts_per_token=active) for n in numbers)

    @property
    def expanded_heads(self) -> int:
        """N * H, the width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def has_vision(self) -> bool:
        return self.vision_num_hidden_layers > 0

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: n-gram sizes 2.. times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def spare(self) -> int:
        """Rows that rings hold beyond their need, so that as many drafted tokens can be written and taken back."""
        return self.dspark_block_size if self.num_nextn_predict_layers else 0


_KEYED = tuple(f for f in fields(Config) if "key" in f.metadata)
_EXPECTED_UNUSED = {
    "architectures", "model_type", "dtype", "transformers_version", "tie_word_embeddings", _QUANT + "activation_scheme",
    _QUANT + "fmt", _TEXT + "model_type", _TEXT + "attention_dropout", _TEXT + "initializer_range",
    _TEXT + "use_cache", _VISION + "model_type",
}  # fmt: skip


def _leaves(node: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in node.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [prefix + key]
    return found


def _lookup(document: Mapping[str, Any], wanted: Mapping[str, Any], kind: str) -> Any:
    node: Any = document
    key = wanted["key"]
    for part in key.split("."):
        if isinstance(node, Mapping) and part not in node and "default" in wanted:
            return wanted["default"]
        if not isinstance(node, Mapping) or part not in node:
            raise ConfigError(f"{key}: is missing")
        node = node[part]
    whole = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    if node is None and kind.endswith("| None"):
        return None
    if kind.startswith("tuple"):
        _require(isinstance(node, list | tuple) and all(map(whole, node)), key, node, "is not a list of integers")
        return tuple(node)
    if kind.startswith("float"):
        _require(whole(node) or isinstance(node, float), key, node, "is not a number")
        _require(abs(node) < HUGE, key, node, "is not a finite number")
        return float(node)
    if kind.startswith("int"):
        _require(whole(node), key, node, "is not an integer")
    else:
        _require(isinstance(node, {"str": str, "bool": bool}[kind]), key, node, f"is not a {kind}")
    return node


def _latest(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _plan(cfg: Config, layer: int) -> LayerPlan:
    ratio, source = cfg.compress_ratios[layer], cfg.candidate_source_layer_id
    owns_kv, owns_index = layer in cfg.kv_source_layer_ids, layer in cfg.index_source_layer_ids
    reads = ratio > 0 and layer not in cfg.window_only_layer_ids
    return LayerPlan(
        id=layer,
        mode=FULL if owns_kv else REINDEX if owns_index else REUSE if reads else WINDOW,
        ratio=ratio,
        experts=cfg.n_routed_experts,
        experts_per_token=cfg.num_experts_per_tok,
        kv_source=_latest(cfg.kv_source_layer_ids, layer) if reads else None,
        index_source=_latest(cfg.index_source_layer_ids, layer) if reads else None,
        publishes_candidates=layer == source,
        obeys_candidates=owns_index and source is not None and layer > source,
        engram_slot=cfg.engram_layer_ids.index(layer) if layer in cfg.engram_layer_ids else None,
        draft_feature=layer in cfg.dspark_target_layer_ids,
    )


def _validate(cfg: Config) -> None:
    keys = {f.name: f.metadata["key"] for f in _KEYED}

    def check(name: str, ok: bool, rule: str) -> None:
        _require(ok, keys[name], getattr(cfg, name), rule)

    _validate_choices(cfg, check)
    _validate_sizes(cfg, check)
    _validate_plan(cfg, check)
    _validate_extras(cfg, check)


def _validate_choices(cfg: Config, check: Any) -> None:
    choices = {
        "quant_method": "fp8", "weight_block_size": (32, 32), "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "rope_type": "yarn",
        "norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }  # fmt: skip
    for name, wanted in choices.items():
        check(name, getattr(cfg, name) == wanted, f"is not supported, only {wanted!r} is")


def _validate_sizes(cfg: Config, check: Any) -> None:
    for name in (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
        "q_lora_rank o_lora_rank o_groups max_position_embeddings n_routed_experts num_experts_per_tok sliding_window "
        "index_n_heads index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters "
        "yarn_original_length"
    ).split():
        check(name, getattr(cfg, name) >= 1, "is not at least 1")
    for name in (
        "swiglu_limit rms_norm_eps rope_theta compress_rope_theta yarn_factor yarn_beta_fast yarn_beta_slow hc_eps "
        "routed_scaling_factor vision_rope_theta"
    ).split():
        value = getattr(cfg, name)
        check(name, 0 < value < float("inf"), "is not a positive finite number")
    check("yarn_factor", cfg.yarn_factor >= 1, "is below 1")
    check("yarn_beta_fast", cfg.yarn_beta_fast > cfg.yarn_beta_slow, f"is not above beta_slow {cfg.yarn_beta_slow}")
    for name in ("num_nextn_predict_layers", "vision_num_hidden_layers", "engram_compressed_vocab_size"):
        check(name, getattr(cfg, name) >= 0, "is negative")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id"):
        value = getattr(cfg, name)
        check(name, 0 <= value < cfg.vocab_size, f"is not a token id below vocab_size {cfg.vocab_size}")
    for name in ["hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "index_head_dim"]:
        check(name, getattr(cfg, name) % 32 == 0, "is not a multiple of the quantization group 32")
    check("o_lora_rank", cfg.o_lora_rank * cfg.o_groups % 32 == 0, "times o_groups is not a multiple of 32")
    check("o_groups", cfg.num_attention_heads % cfg.o_groups == 0, "does not divide num_attention_heads")
    check("qk_rope_head_dim", cfg.qk_rope_head_dim % 2 == 0, "is odd; channels rotate in pairs")
    widest = min(cfg.head_dim, cfg.index_head_dim)
    check("qk_rope_head_dim", cfg.qk_rope_head_dim <= widest, f"exceeds head_dim or index_head_dim ({widest})")
    check("num_experts_per_tok", cfg.num_experts_per_tok <= cfg.n_routed_experts, "exceeds n_routed_experts")


def _validate_ids(cfg: Config, check: Any, name: str) -> None:
    ids = getattr(cfg, name)
    check(name, list(ids) == sorted(set(ids)), "is not sorted without repeats")
    inside = all(0 <= i < cfg.num_hidden_layers for i in ids)
    check(name, inside, f"names a layer outside 0..{cfg.num_hidden_layers - 1}")


def _validate_plan(cfg: Config, check: Any) -> None:
    ratios, layers, drafts = cfg.compress_ratios, cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    lengths = f"has {len(ratios)} entries, not {layers} (layers) or {layers + drafts} (layers and draft stages)"
    check("compress_ratios", len(ratios) in (layers, layers + drafts), lengths)
    check("compress_ratios", all(r in (0, 1, 2) for r in ratios), "has a ratio other than 0, 1 or 2")
    check("compress_ratios", not any(ratios[layers:]), "gives a draft stage a ratio other than 0")
    for name in ("kv_source", "index_source", "engram", "dspark_target", "window_only"):
        _validate_ids(cfg, check, f"{name}_layer_ids")
    kv, index, source = cfg.kv_source_layer_ids, cfg.index_source_layer_ids, cfg.candidate_source_layer_id
    check("kv_source_layer_ids", set(kv) <= set(index), f"has a layer that is not in index_source_layer_ids {index}")
    no_ratio = [i for i in index if ratios[i] == 0]
    check("index_source_layer_ids", not no_ratio, f"has window-only layers {no_ratio} (compress_ratios 0)")
    if source is not None:
        check("candidate_source_layer_id", source in index, f"is not in index_source_layer_ids {index}")
        pool = (cfg.candidate_topk_blocks - 1) * cfg.candidate_block_size + 1
        rule = f"blocks of {cfg.candidate_block_size} may hold {pool} visible entries, fewer than index_topk "
        check("candidate_topk_blocks", pool >= cfg.index_topk, rule + str(cfg.index_topk))
    for layer in range(layers):
        if not ratios[layer] or (layer in cfg.window_only_layer_ids and layer not in index):
            continue
        here = _with_ratio(ratios, layer)
        sources = (_latest(kv, layer), _latest(index, layer))
        check("kv_source_layer_ids", sources[0] is not None, f"leaves {here} without a source at or below it")
        for read in sources:
            check("compress_ratios", ratios[read] == ratios[layer], f"makes {here} read {_with_ratio(ratios, read)}")
        if layer in index and source is not None and layer > source:
            rule = f"makes {here} obey candidates of layer {source}"
            check("compress_ratios", ratios[source] == ratios[layer], rule)


def _with_ratio(ratios: tuple[int, ...], layer: int) -> str:
    return f"layer {layer} (ratio {ratios[layer]})"


def _validate_extras(cfg: Config, check: Any) -> None:
    if cfg.engram_layer_ids:
        for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
            check(name, getattr(cfg, name) >= 1, "is not at least 1")
        check("engram_max_ngram_size", cfg.engram_max_ngram_size >= 2, "is not at least 2")
        check("engram_head_dim", cfg.engram_head_dim % 32 == 0, "is not a multiple of the quantization group 32")
    layers = len(cfg.engram_layer_ids)
    check("engram_num_embeddings", len(cfg.engram_num_embeddings) == layers, f"is not one count for {layers} layers")
    if cfg.num_nextn_predict_layers:
        for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
            check(name, getattr(cfg, name) >= 1, "is not at least 1")
        noise, per_token = cfg.dspark_noise_token_id, cfg.dspark_num_experts_per_tok
        check("dspark_noise_token_id", 0 <= noise < cfg.vocab_size, f"is not below vocab_size {cfg.vocab_size}")
        check("dspark_num_experts_per_tok", 1 <= per_token <= cfg.dspark_n_routed_experts, "is not in 1..experts")
        check("dspark_target_layer_ids", len(cfg.dspark_target_layer_ids) >= 1, "is empty, but there are draft stages")
    if cfg.has_vision:
        for name in ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio"):
            check(f"vision_{name}", getattr(cfg, f"vision_{name}") >= 1, "is not at least 1")
        check("vision_max_image_tokens", cfg.vision_max_image_tokens >= 4, "is less than the 4 of the smallest span")
        check("vision_min_pixels", cfg.vision_min_pixels >= 0, "is negative")
        check("vision_max_wh_ratio", cfg.vision_max_wh_ratio is None, "is not supported, only null is")
        width, heads = cfg.vision_hidden_size, cfg.vision_num_attention_heads
        rule = f"does not split vision hidden_size {width} into heads of a multiple of 4"
        check("vision_num_attention_heads", width % (4 * heads) == 0, rule)
