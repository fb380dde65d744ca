"""Golden vectors of single operations (`units.npz`): codes, ids, scales bit-equal, the rest to its rounding."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.engine.ngrams import layouts, multipliers
from dsv41_jax.nn.cache import Span, window_ids
from dsv41_jax.nn.dspark import block_ids
from dsv41_jax.nn.linear import product, product_f32
from dsv41_jax.nn.moe import route
from dsv41_jax.nn.rope import frequencies, rotate, yarn_frequencies
from pallas_kernels.formats import cast, dequantize_fp4, dequantize_fp8
from pallas_kernels.indexer.reference import candidate_blocks, mask_scores
from pallas_kernels.mhc.reference import split_coefficients
from pallas_kernels.quantize import quantize_fp8, round_fp8, round_mxfp4, round_nvfp4
from pallas_kernels.sparse_attention import sparse_attention
from parity.table import Row, compare, compare_equal

BFLOAT16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn
ULP = 2.0**-7  # of bfloat16, relative: sums in another order may round to the neighbour


def _quantizers(z: dict[str, np.ndarray]) -> Iterator[Row]:
    x = jnp.asarray(z["quant/x"]).astype(BFLOAT16)
    values, scale = jax.jit(quantize_fp8)(x)
    found = {
        "fp8_codes": np.asarray(values).view(np.uint8),
        "fp8_scale_exp": scale,
        "fp8_values": values,
        "fp8_block32_dequant": jax.jit(round_fp8)(x),
        "mxfp4_block32_dequant": jax.jit(round_mxfp4)(x),
        "nvfp4_block16_e4m3_dequant": jax.jit(round_nvfp4)(x),
    }
    for name, got in found.items():
        yield compare_equal("quant", name, np.asarray(got).astype(z[f"quant/{name}"].dtype), z[f"quant/{name}"])


def _products(z: dict[str, np.ndarray]) -> Iterator[Row]:
    scales = {kind: jnp.asarray(z[f"gemm/w_{kind}_scale_bytes"]) for kind in ("fp8", "fp4")}
    weights = {
        "fp8": dequantize_fp8(jnp.asarray(z["gemm/w_fp8_bytes"].view(E4M3)), scales["fp8"]),
        "fp4": dequantize_fp4(jnp.asarray(z["gemm/w_fp4_bytes"]), scales["fp4"]),
    }
    x = round_fp8(jnp.asarray(z["gemm/x"]).astype(BFLOAT16))
    for kind, weight in weights.items():
        yield compare_equal("gemm", f"w_{kind}_dequant", np.asarray(weight), z[f"gemm/w_{kind}_dequant"])
        out = np.asarray(cast(product(x, weight.astype(BFLOAT16)), BFLOAT16).astype(jnp.float32))
        bound = float(ULP * np.abs(z[f"gemm/{kind}_out"]).max())
        yield compare("gemm", f"{kind}_out", out, z[f"gemm/{kind}_out"], bound, "one bfloat16 ulp of the largest")


def _attention(z: dict[str, np.ndarray]) -> Iterator[Row]:
    for name, dtype, bound in (("out_quantized_bf16", BFLOAT16, 0.0), ("out_float32", jnp.float32, 1e-6)):
        q, kv = (jnp.asarray(z[f"attn/{part}"]).astype(dtype) for part in ("q", "kv"))
        ids = jnp.asarray(z["attn/idx"])
        first, rest = ids[..., :32], ids[..., 32:]
        o, _ = sparse_attention(q, kv, first, kv, rest, jnp.asarray(z["attn/sink"]), scale=q.shape[-1] ** -0.5)
        yield compare("attn", name, np.asarray(cast(o, dtype).astype(jnp.float32)), z[f"attn/{name}"], bound)


def _sinkhorn(z: dict[str, np.ndarray]) -> Iterator[Row]:
    parts = (jnp.asarray(z[f"sinkhorn/{name}"]) for name in ("mixes", "scale", "base"))
    found = split_coefficients(*parts, streams=4, iterations=20, hc_eps=1e-6)
    for name, got in zip(("pre", "post", "comb"), found, strict=True):
        yield compare("sinkhorn", name, got, z[f"sinkhorn/{name}"], 1e-6)


def _rope(z: dict[str, np.ndarray]) -> Iterator[Row]:
    tables = {}
    for name in ("plain", "yarn_tiny", "yarn_release"):
        dim, length, original, theta, factor, fast, slow = z[f"rope/{name}_args"]
        yarn = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "original": int(original)}
        freqs = yarn_frequencies(int(dim), theta, **yarn) if original else frequencies(int(dim), theta)
        tables[name] = freqs
        angles = np.arange(length, dtype=np.float32)[:, None] * freqs
        for part, got in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            yield compare("rope", f"{name}_{part}", got, z[f"rope/{name}_{part}"], 1e-6)
    x = jnp.asarray(z["rope/x"])
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    for name, inverse in (("rotated", False), ("inverse", True)):
        key = f"x_{name}_yarn_tiny_pos0_9"
        yield compare("rope", key, rotate(x, positions, tables["yarn_tiny"], inverse=inverse), z[f"rope/{key}"], 1e-5)


def _selection(z: dict[str, np.ndarray]) -> Iterator[Row]:
    size, wanted = 4, 3
    for scores_key, mask_key in (("scores", "mask_topk3_block4"), ("decode_scores", "decode_mask")):
        scores, golden = jnp.asarray(z[f"candidates/{scores_key}"]), z[f"candidates/{mask_key}"]
        batch, tokens, entries = scores.shape
        visible = jnp.broadcast_to(jnp.arange(entries - tokens, entries, dtype=jnp.int32) + 1, (batch, tokens))
        ids = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), (batch, 1, entries))
        blocks = candidate_blocks(mask_scores(scores, ids, visible), visible, blocks=wanted, size=size)
        inside = (np.asarray(blocks)[..., None] == np.arange(entries) // size).any(axis=-2)
        seen = np.arange(entries) < np.asarray(visible)[..., None]
        yield compare_equal("candidates", mask_key, inside & seen, golden & seen, "equal where visible")


def _windows(z: dict[str, np.ndarray]) -> Iterator[Row]:
    for key in (key for key in z if key.startswith("window_idx/")):
        name = key.removeprefix("window_idx/")
        window, *block, position = (int(n) for n in re.findall(r"\d+", name))
        start, tokens = (0, position) if name.startswith("prefill") else (position, 1)
        if block:
            ids = np.asarray(block_ids(position + 1 + jnp.arange(block[0], dtype=jnp.int32)[None], window, window))
        else:
            span = Span.after(jnp.full((1,), start, jnp.int32), jnp.full((1,), tokens, jnp.int32), tokens)
            ids = np.asarray(window_ids(span, window, window))
            ids = np.where(ids >= window, (start + ids - window) % (window if start else 1 << 30), ids)
        rows = [sorted(i for i in row if i >= 0) for row in ids[0].tolist()]
        golden = [sorted(i for i in row if i >= 0) for row in z[key][0].tolist()]
        different = sum(a != b for a, b in zip(rows, golden, strict=True))
        yield compare("window_idx", name, np.array(different), np.array(0), 0, "equal as sets")


def _engram(z: dict[str, np.ndarray]) -> Iterator[Row]:
    for key in (key for key in z if key.startswith("engram/multipliers")):
        *layers, count, vocabulary = (int(n) for n in re.findall(r"\d+", key))
        got = np.stack([multipliers(layer, count, vocabulary) for layer in layers])
        yield compare_equal("engram", key.removeprefix("engram/"), got, z[key])
    primes = np.stack([layout.primes for layout in layouts(Config.flash())])
    golden = z["engram/release_primes_layer_ngram_head"]
    yield compare_equal("engram", "release_primes_layer_ngram_head", primes.reshape(golden.shape), golden)


def _gate(z: dict[str, np.ndarray]) -> Iterator[Row]:
    image = jnp.asarray(z["gate/image_mask"])[:, None]
    bias = jnp.where(image, jnp.asarray(z["gate/bias_vl"]), jnp.asarray(z["gate/bias"]))
    logits = product_f32(jnp.asarray(z["gate/x"]), jnp.asarray(z["gate/weight"]))
    ids, weights = route(logits, bias, per_token=z["gate/out_experts"].shape[1], scale=1.5)
    order = np.argsort(z["gate/out_experts"], axis=-1)
    golden = {name: np.take_along_axis(z[f"gate/{name}"], order, axis=-1) for name in ("out_experts", "out_weights")}
    yield compare_equal("gate", "out_experts", np.asarray(ids).astype(np.int64), golden["out_experts"])
    yield compare("gate", "out_weights", weights, golden["out_weights"], 1e-6)


def compare_units(directory: Path) -> list[Row]:
    """Every vector of `units.npz` in `directory`."""
    z = dict(np.load(directory / "units.npz"))
    parts = (_quantizers, _products, _attention, _sinkhorn, _rope, _selection, _windows, _engram, _gate)
    return [row for part in parts for row in part(z)]
