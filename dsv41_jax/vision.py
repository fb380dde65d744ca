"""The vision tower and its aligner: parameters, named as in the checkpoint (facts 5)."""

import jax.numpy as jnp
from flax import nnx

from dsv41_jax.config import Config
from dsv41_jax.linear import Linear
from dsv41_jax.norm import RMSNorm

EPS = 1e-6  # of every norm in the tower; the text model's rms_norm_eps does not apply


class VisionAttention(nnx.Module):
    def __init__(self, width: int):
        self.wqkv = Linear(3 * width, width, ("heads", "width"), bias=True)
        self.wo = Linear(width, width, ("width", "heads"), bias=True)


class VisionMLP(nnx.Module):
    """`w1` holds the gate's rows, then the up projection's."""

    def __init__(self, width: int, hidden: int):
        self.w1 = Linear(2 * hidden, width, ("hidden", "width"))
        self.w2 = Linear(width, hidden, ("width", "hidden"))


class VisionBlock(nnx.Module):
    def __init__(self, cfg: Config):
        self.norm1 = RMSNorm(cfg.vision_hidden_size, EPS)
        self.attn = VisionAttention(cfg.vision_hidden_size)
        self.norm2 = RMSNorm(cfg.vision_hidden_size, EPS)
        self.mlp = VisionMLP(cfg.vision_hidden_size, cfg.vision_intermediate_size)


class PatchEmbed(nnx.Module):
    def __init__(self, cfg: Config):
        self.proj = Linear(cfg.vision_hidden_size, 3 * cfg.vision_patch_size**2, ("width", "patch"), bias=True)


class Vision(nnx.Module):
    def __init__(self, cfg: Config):
        self.patch_embed = PatchEmbed(cfg)
        self.blocks = nnx.List([VisionBlock(cfg) for _ in range(cfg.vision_num_hidden_layers)])
        self.norm = RMSNorm(cfg.vision_hidden_size, EPS)


class Aligner(nnx.Module):
    """Square windows of `downsample_ratio` patches a side become one token of width D."""

    def __init__(self, cfg: Config):
        window = cfg.vision_hidden_size * cfg.vision_downsample_ratio**2
        self.w1 = Linear(cfg.hidden_size, window, ("width", "patch"), bias=True)
        self.w2 = Linear(cfg.hidden_size, cfg.hidden_size, ("width", "width"), bias=True)


def delimiter(cfg: Config) -> nnx.Param:
    """One learned vector of the image span: `image_start`, `image_newline` or `image_end`."""
    return nnx.Param(jnp.zeros((cfg.hidden_size,), jnp.bfloat16), axes=("width",))
