"""DeepSeek-V4.1-Flash in JAX: every component short, readable and checked against the released program."""

from dsv41_jax.config import Config, ConfigError
from dsv41_jax.files.directory import CheckpointError
from dsv41_jax.files.safetensors import Checkpoint
from dsv41_jax.model import Model
from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.transformer import Call, Output, Transformer

__all__ = ["Cache", "Call", "Checkpoint", "CheckpointError", "Config", "ConfigError", "Model", "Output", "Transformer"]
__version__ = "0.1.0"
