"""Rotary embedding: adjacent pairs of the last R channels, rotated in float32 (YaRN: arXiv 2309.00071; config rope_*).

    angle(p, i) = p * f_i,   f_i = theta**(-2i / R)
    YaRN:  d(r) = R ln(original / (2 pi r)) / (2 ln theta),  low = max(floor d(beta_fast), 0),
           high = min(ceil d(beta_slow), R - 1),  ramp_i = clip((i - low) / max(high - low, 1e-3), 0, 1)
           f_i <- f_i (1 - ramp_i) + (f_i / factor) ramp_i

Frequencies and angles are float32 as in the released program: exact ones differ by 2e-2 rad at a million tokens and
are another model. There is no attention-temperature factor.
"""

import math

import numpy as np
from jaxtyping import Float32

from dsv41_jax.config import Config
from pallas_kernels.rotary import rotate

__all__ = ["frequencies", "layer_frequencies", "rotate", "yarn_frequencies"]


def frequencies(dim: int, theta: float) -> Float32[np.ndarray, " pairs"]:
    """f_i for the pairs of `dim` rotary channels, each step rounded to float32."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.power(theta, exponent.astype(np.float64)).astype(np.float32)


def yarn_frequencies(
    dim: int, theta: float, *, factor: float, beta_fast: float, beta_slow: float, original: int
) -> Float32[np.ndarray, " pairs"]:
    """f_i after YaRN's blend: pairs that turn often keep theirs, slow pairs are divided by `factor`."""

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), dim - 1)
    pairs = np.arange(dim // 2, dtype=np.float32)
    kept = np.float32(1) - np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    plain = frequencies(dim, theta)
    return plain / np.float32(factor) * (np.float32(1) - kept) + plain * kept


def layer_frequencies(cfg: Config, ratio: int) -> Float32[np.ndarray, " pairs"]:
    """Window layers (ratio 0): rope_theta, no scaling. Compressed layers: compress_rope_theta with YaRN."""
    if ratio == 0:
        return frequencies(cfg.qk_rope_head_dim, cfg.rope_theta)
    return yarn_frequencies(
        cfg.qk_rope_head_dim,
        cfg.compress_rope_theta,
        factor=cfg.yarn_factor,
        beta_fast=cfg.yarn_beta_fast,
        beta_slow=cfg.yarn_beta_slow,
        original=cfg.yarn_original_length,
    )
