"""What a config may say: limits of each number, and the rules between keys (paper 2.2 to 2.4).

Each key is named at most once, with the first of its rules that it breaks; a rule that would read a value that is
wrong already is left out, so that one mistake is not told twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsv41_jax.untrusted import shown

CHOICES = {
    "quant_method": "fp8", "weight_block_size": (32, 32), "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "rope_type": "yarn",
    "norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1,
    "n_shared_experts": 1,
}  # fmt: skip
AT_LEAST_ONE = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
    "q_lora_rank o_lora_rank o_groups max_position_embeddings n_routed_experts num_experts_per_tok sliding_window "
    "index_n_heads index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters "
    "yarn_original_length"
).split()
POSITIVE = (
    "swiglu_limit rms_norm_eps rope_theta compress_rope_theta yarn_factor yarn_beta_fast yarn_beta_slow hc_eps "
    "routed_scaling_factor vision_rope_theta"
).split()
INT32 = 2**31 - 1  # positions, token ids and table rows are 32-bit integers
# The most that a number may be, far above the release's (in brackets): a small file must not ask for hours or for all
# memory before its tensors are even compared.
LIMITS = (
    {  # each is a module, an unrolled step or a name of its own
        "num_hidden_layers": 1024,  # (40)
        "vision_num_hidden_layers": 1024,  # (32)
        "num_nextn_predict_layers": 256,  # (3)
        "n_routed_experts": 65_536,  # (384)
        "dspark_n_routed_experts": 65_536,  # (128)
        "dspark_block_size": 256,  # (5)
        "hc_mult": 64,  # (4)
        "hc_sinkhorn_iters": 1024,  # (20)
        "engram_max_ngram_size": 64,  # (4)
        "engram_n_heads": 1024,  # (8)
    }
    | dict.fromkeys(  # widths, and what a token reads (at most 32,768)
        (
            "hidden_size moe_intermediate_size num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
            "o_groups index_n_heads index_head_dim index_topk candidate_topk_blocks candidate_block_size "
            "sliding_window engram_head_dim dspark_markov_rank vision_hidden_size vision_num_attention_heads "
            "vision_intermediate_size vision_max_image_tokens"
        ).split(),
        1 << 20,
    )
    | {"vocab_size": 1 << 24, "engram_compressed_vocab_size": 1 << 24}  # (129,280), (99,092)
    | {"vision_patch_size": 1024, "vision_downsample_ratio": 64}  # (14), (3): their squares are widths
    | dict.fromkeys(
        ["max_position_embeddings", "yarn_original_length", "engram_vocab_size", "vision_min_pixels"], INT32
    )
)
PRODUCTS = {  # axes of one array, and how many names and primes there are: factors, the most, where the product stands
    "num_attention_heads": (("head_dim",), INT32),
    "o_groups": (("o_lora_rank",), INT32),
    "index_n_heads": (("index_head_dim",), INT32),
    "candidate_topk_blocks": (("candidate_block_size",), INT32),
    "n_routed_experts": (("num_hidden_layers",), 1 << 18),  # (15,360), of six tensors each
    "dspark_n_routed_experts": (("num_nextn_predict_layers",), 1 << 18),
    "engram_n_heads": (("engram_max_ngram_size", "engram_head_dim"), INT32),
    "vision_downsample_ratio": (("vision_downsample_ratio", "vision_hidden_size"), INT32),
}
ENGRAM_COLUMNS = 1 << 16  # (48): each has a prime of its own
Test, Rule = Callable[[Any], bool], str | Callable[[Any], str]


class _WrongAlready(Exception):
    """A rule reads a key that is missing or has broken another one."""


class _Given:
    """The values of a config by field, without those that were found wrong."""

    def __init__(self, values: Mapping[str, Any], keys: Mapping[str, str]):
        self.values, self.keys, self.problems = dict(values), keys, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in self.keys:
            raise AttributeError(name)
        if name not in self.values:
            raise _WrongAlready
        return self.values[name]

    def check(self, name: str, holds: Test, rule: Rule) -> None:
        """Note the problem, unless the rule holds or cannot be told."""
        try:
            if name not in self.values or holds(self):
                return
            said = rule if isinstance(rule, str) else rule(self)
        except _WrongAlready:
            return
        self.problems.append(f"{self.keys[name]}: {shown(self.values.pop(name))} {said}")

    def least(self, name: str, least: int, rule: str) -> None:
        """A lower bound."""
        self.check(name, lambda c: getattr(c, name) >= least, rule)

    def multiple_of_32(self, name: str) -> None:
        """What is quantized is a whole number of groups."""
        self.check(name, lambda c: getattr(c, name) % 32 == 0, "is not a multiple of the quantization group 32")


def broken_rules(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """A line for each key that breaks a rule. `values` are of the right types, by field; some may be missing, which
    `keys` knows by their names in the file."""
    given = _Given(values, keys)
    for name, wanted in CHOICES.items():
        _choice(given, name, wanted)
    _sizes(given)
    _limits(given)
    _tokens_and_widths(given)
    _plan(given)
    _engram(given)
    _drafts(given)
    _vision(given)
    _products(given)
    return given.problems


def latest(ids: tuple[int, ...], layer: int) -> int | None:
    """The last of `ids` at or below a layer."""
    return max((i for i in ids if i <= layer), default=None)


def _choice(given: _Given, name: str, wanted: object) -> None:
    given.check(name, lambda c: getattr(c, name) == wanted, f"is not supported, only {wanted!r} is")


def _sizes(given: _Given) -> None:
    for name in AT_LEAST_ONE:
        given.least(name, 1, "is not at least 1")
    for name in POSITIVE:
        _positive(given, name)
    given.check("yarn_factor", lambda c: c.yarn_factor >= 1, "is below 1")
    rule = "is not above beta_slow {}".format
    given.check("yarn_beta_fast", lambda c: c.yarn_beta_fast > c.yarn_beta_slow, lambda c: rule(c.yarn_beta_slow))
    for name in ("num_nextn_predict_layers", "vision_num_hidden_layers", "engram_compressed_vocab_size"):
        given.least(name, 0, "is negative")


def _positive(given: _Given, name: str) -> None:
    given.check(name, lambda c: 0 < getattr(c, name) < float("inf"), "is not a positive finite number")


def _limits(given: _Given) -> None:
    for name, most in LIMITS.items():
        _limit(given, name, most)


def _limit(given: _Given, name: str, most: int) -> None:
    given.check(name, lambda c: getattr(c, name) <= most, f"is more than {most}, the most that is supported")


def _products(given: _Given) -> None:
    for name, (others, most) in PRODUCTS.items():
        _product(given, name, others, most)


def _product(given: _Given, name: str, others: tuple[str, ...], most: int) -> None:
    def within(c: Any) -> bool:
        product = getattr(c, name)
        for other in others:
            product *= max(getattr(c, other), 1)
        return product <= most

    factors = " times ".join(others)
    given.check(name, within, f"times {factors} is more than {most}, the most that is supported")


def _token(given: _Given, name: str) -> None:
    rule = "is not a token id below vocab_size {}".format
    given.check(name, lambda c: 0 <= getattr(c, name) < c.vocab_size, lambda c: rule(c.vocab_size))


def _tokens_and_widths(given: _Given) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id"):
        _token(given, name)
    for name in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "index_head_dim"):
        given.multiple_of_32(name)
    check = given.check
    check("o_lora_rank", lambda c: c.o_lora_rank * c.o_groups % 32 == 0, "times o_groups is not a multiple of 32")
    check("o_groups", lambda c: c.num_attention_heads % c.o_groups == 0, "does not divide num_attention_heads")
    check("qk_rope_head_dim", lambda c: c.qk_rope_head_dim % 2 == 0, "is odd; channels rotate in pairs")
    check(
        "qk_rope_head_dim",
        lambda c: c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
        lambda c: f"exceeds head_dim or index_head_dim ({min(c.head_dim, c.index_head_dim)})",
    )
    check("num_experts_per_tok", lambda c: c.num_experts_per_tok <= c.n_routed_experts, "exceeds n_routed_experts")


def _ids(given: _Given, name: str) -> None:
    given.check(
        name, lambda c: list(getattr(c, name)) == sorted(set(getattr(c, name))), "is not sorted without repeats"
    )
    given.check(
        name,
        lambda c: all(0 <= i < c.num_hidden_layers for i in getattr(c, name)),
        lambda c: f"names a layer outside 0..{c.num_hidden_layers - 1}",
    )


def _plan(given: _Given) -> None:
    def lengths(c: Any) -> tuple[int, int]:
        return c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers

    given.check(
        "compress_ratios",
        lambda c: len(c.compress_ratios) in lengths(c),
        lambda c: (
            f"has {len(c.compress_ratios)} entries, not {lengths(c)[0]} (layers) or {lengths(c)[1]} "
            "(layers and draft stages)"
        ),
    )
    check = given.check
    check("compress_ratios", lambda c: set(c.compress_ratios) <= {0, 1, 2}, "has a ratio other than 0, 1 or 2")
    rule = "gives a draft stage a ratio other than 0"
    check("compress_ratios", lambda c: not any(c.compress_ratios[c.num_hidden_layers :]), rule)
    for name in ("kv_source", "index_source", "engram", "dspark_target", "window_only"):
        _ids(given, f"{name}_layer_ids")
    held = "is not in index_source_layer_ids {}".format
    check(
        "kv_source_layer_ids",
        lambda c: set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
        lambda c: f"has a layer that {held(c.index_source_layer_ids)}",
    )

    def no_ratio(c: Any) -> list[int]:
        return [i for i in c.index_source_layer_ids if c.compress_ratios[i] == 0]

    windows = "has window-only layers {} (compress_ratios 0)".format
    check("index_source_layer_ids", lambda c: not no_ratio(c), lambda c: windows(no_ratio(c)))
    check(
        "candidate_source_layer_id",
        lambda c: c.candidate_source_layer_id in (None, *c.index_source_layer_ids),
        lambda c: held(c.index_source_layer_ids),
    )

    def pool(c: Any) -> int:
        return (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1

    check(
        "candidate_topk_blocks",
        lambda c: c.candidate_source_layer_id is None or pool(c) >= c.index_topk,
        lambda c: (
            f"blocks of {c.candidate_block_size} may hold {pool(c)} visible entries, fewer than "
            f"index_topk {c.index_topk}"
        ),
    )
    for name in ("kv_source_layer_ids", "compress_ratios"):
        check(name, lambda c, name=name: _unread(c, name) is None, lambda c, name=name: str(_unread(c, name)))


def _unread(c: Any, blamed: str) -> str | None:
    """What the first layer that cannot read its sources says of the key `blamed`."""
    ratios, kv, index, source = (
        c.compress_ratios, c.kv_source_layer_ids, c.index_source_layer_ids, c.candidate_source_layer_id
    )  # fmt: skip
    told = lambda layer: f"layer {layer} (ratio {ratios[layer]})"  # noqa: E731
    for layer in range(c.num_hidden_layers):
        if not ratios[layer] or (layer in c.window_only_layer_ids and layer not in index):
            continue
        own, chosen = latest(kv, layer), latest(index, layer)
        if blamed == "kv_source_layer_ids":
            if own is None:
                return f"leaves {told(layer)} without a source at or below it"
            continue
        for read in (own, chosen):
            if read is not None and ratios[read] != ratios[layer]:
                return f"makes {told(layer)} read {told(read)}"
        if layer in index and source is not None and layer > source and ratios[source] != ratios[layer]:
            return f"makes {told(layer)} obey candidates of layer {source}"
    return None


def _engram(given: _Given) -> None:
    if given.values.get("engram_layer_ids"):
        for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
            given.least(name, 1, "is not at least 1")
        given.least("engram_max_ngram_size", 2, "is not at least 2")
        given.multiple_of_32("engram_head_dim")
    given.check(
        "engram_num_embeddings",
        lambda c: len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        lambda c: f"is not one count for {len(c.engram_layer_ids)} layers",
    )
    rule = f"has a count outside 1..{INT32}"
    given.check("engram_num_embeddings", lambda c: all(1 <= n <= INT32 for n in c.engram_num_embeddings), rule)
    given.check(
        "engram_n_heads",
        lambda c: len(c.engram_layer_ids) * (c.engram_max_ngram_size - 1) * c.engram_n_heads <= ENGRAM_COLUMNS,
        f"times n-gram sizes and layers is more than {ENGRAM_COLUMNS}, the most that is supported",
    )


def _drafts(given: _Given) -> None:
    if not given.values.get("num_nextn_predict_layers"):
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
        given.least(name, 1, "is not at least 1")
    check = given.check
    check(
        "dspark_noise_token_id",
        lambda c: 0 <= c.dspark_noise_token_id < c.vocab_size,
        lambda c: f"is not below vocab_size {c.vocab_size}",
    )
    check(
        "dspark_num_experts_per_tok",
        lambda c: 1 <= c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
        "is not in 1..experts",
    )
    check("dspark_target_layer_ids", lambda c: c.dspark_target_layer_ids, "is empty, but there are draft stages")


def _vision(given: _Given) -> None:
    if not given.values.get("vision_num_hidden_layers"):
        return
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio"):
        given.least(f"vision_{name}", 1, "is not at least 1")
    given.least("vision_max_image_tokens", 4, "is less than the 4 of the smallest span")
    given.least("vision_min_pixels", 0, "is negative")
    given.check("vision_max_wh_ratio", lambda c: c.vision_max_wh_ratio is None, "is not supported, only null is")
    given.check(
        "vision_num_attention_heads",
        lambda c: c.vision_hidden_size % (4 * c.vision_num_attention_heads) == 0,
        lambda c: f"does not split vision hidden_size {c.vision_hidden_size} into heads of a multiple of 4",
    )
