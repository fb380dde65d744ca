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

from dsv41_jax.config_rules import broken_rules, latest
from dsv41_jax.untrusted import few, read, shown, unique

HUGE = 1e300  # JSON spells infinity as a number too large for a float
CONFIG_BYTES = 10_000_000  # the release's is 3,311
_ABSENT = object()
WINDOW, FULL, REINDEX, REUSE = "window", "full", "reindex", "reuse"


class ConfigError(ValueError):
    """A config breaks rules; one line that names key, value and rule of each, the first few of many. `problems` has
    all of them."""

    def __init__(self, *problems: str):
        super().__init__(few(problems))
        self.problems = problems


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


@dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """The architecture as flat data. A field is named after its key; `json_text` keeps the file's every key.

    Build one with `from_pretrained`, `from_dict`, `flash` or `tiny`, and a changed copy with `replace`. However it is
    made, it obeys `config_rules`, or a ConfigError names every key that does not. Source: the released config.json.

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

    def __post_init__(self) -> None:
        document, changed = _parsed(self.json_text, "json_text"), False
        if not isinstance(document, dict):
            raise ConfigError(f"json_text: {shown(document)} is not a JSON object")
        for f in _KEYED:
            value, held = getattr(self, f.name), _found(document, f.metadata["key"])
            wanted = list(value) if isinstance(value, tuple) else value
            if held != wanted and not (held is _ABSENT and f.metadata.get("default", _ABSENT) == value):
                _put(document, f.metadata["key"], wanted)
                changed = True
        _checked(document)
        if changed:  # a field is right, what the file said of it is not
            object.__setattr__(self, "json_text", json.dumps(document, ensure_ascii=False))

    def __repr__(self) -> str:
        parts = [
            f"{self.num_hidden_layers} layers", f"width {self.hidden_size}",
            f"{self.num_attention_heads} heads of {self.head_dim}",
            f"{self.num_experts_per_tok} of {self.n_routed_experts} experts", f"vocabulary {self.vocab_size}",
            f"{self.max_position_embeddings} positions",
        ]  # fmt: skip
        parts += [f"Engram in {len(self.engram_layer_ids)} layers"] if self.engram_layer_ids else []
        parts += [f"{self.num_nextn_predict_layers} draft stages"] if self.num_nextn_predict_layers else []
        parts += [f"vision of {self.vision_num_hidden_layers} layers"] if self.has_vision else []
        return f"Config({', '.join(parts)})"

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Config:
        """Read `config.json` (or the directory that holds it); "tiny" is the bundled checkpoint's."""
        if path == "tiny":
            return cls.tiny()
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            content = read(path, CONFIG_BYTES)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        return cls.from_dict(_parsed(content, path))

    @classmethod
    def from_dict(cls, document: object) -> Config:
        """Check a nested config (the released layout) and flatten it; unknown keys are kept in `json_text`."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"config: {shown(document)} is not a JSON object")
        try:
            text = json.dumps(document, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"config: is not what JSON can hold ({error})") from None
        return cls(json_text=text, **_checked(document))

    @classmethod
    def flash(cls, **changes: Any) -> Config:
        """DeepSeek-V4.1-Flash as released on 2026-09-10, with some fields changed."""
        return _bundled("flash").replace(**changes)

    @classmethod
    def tiny(cls, **changes: Any) -> Config:
        """The bundled checkpoint's config, eight layers and every feature on, with some fields changed."""
        return _bundled("tiny").replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """The nested config, unknown keys included."""
        return json.loads(self.json_text)

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, validated again."""
        document, keys = self.to_dict(), {f.name: f.metadata["key"] for f in _KEYED}
        if strange := [name for name in changes if name not in keys]:
            wrong = "is set, but there is no such field"
            raise ConfigError(*(f"{name}: {shown(changes[name])} {wrong}" for name in strange))
        for name, value in changes.items():
            _put(document, keys[name], value)
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


def _bundled(name: str) -> Config:
    return Config.from_pretrained(Path(str(resources.files("dsv41_jax"))) / "data" / name)


def _parsed(content: str | bytes, where: object) -> Any:
    try:
        return json.loads(content if isinstance(content, str) else content.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from None


def _found(document: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, or _ABSENT."""
    node: Any = document
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _put(document: Any, key: str, value: object) -> None:
    *sections, last = key.split(".")
    node = document
    for section in sections:
        node = node.setdefault(section, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"{key}: its section is not a JSON object")
    node[last] = value


def _checked(document: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every field. Raises a ConfigError of every key that is missing, of a wrong type or breaks a rule."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for f in _KEYED:
        try:
            values[f.name] = _lookup(document, f.metadata, str(f.type))
        except ConfigError as error:
            problems += error.problems
    problems += broken_rules(values, {f.name: f.metadata["key"] for f in _KEYED})
    if problems:
        raise ConfigError(*problems)
    return values


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: {shown(value)} {rule}")


def _lookup(document: Mapping[str, Any], wanted: Mapping[str, Any], kind: str) -> Any:
    key = wanted["key"]
    node = _found(document, key)
    if node is _ABSENT and "default" in wanted:
        return wanted["default"]
    if node is _ABSENT:
        raise ConfigError(f"{key}: is missing")
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
        kv_source=latest(cfg.kv_source_layer_ids, layer) if reads else None,
        index_source=latest(cfg.index_source_layer_ids, layer) if reads else None,
        publishes_candidates=layer == source,
        obeys_candidates=owns_index and source is not None and layer > source,
        engram_slot=cfg.engram_layer_ids.index(layer) if layer in cfg.engram_layer_ids else None,
        draft_feature=layer in cfg.dspark_target_layer_ids,
    )
