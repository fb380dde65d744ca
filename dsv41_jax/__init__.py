"""DeepSeek-V4.1-Flash in JAX: every component short, readable and checked against the released program."""

from dsv41_jax.cache import Cache
from dsv41_jax.checkpoint import Checkpoint, CheckpointError
from dsv41_jax.config import Config, ConfigError
from dsv41_jax.model import Transformer, forward
from dsv41_jax.pretrained import Model

__all__ = ["Cache", "Checkpoint", "CheckpointError", "Config", "ConfigError", "Model", "Transformer", "forward"]
__version__ = "0.1.0"
