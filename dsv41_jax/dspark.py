"""The DSpark drafter: parameters, named as in the checkpoint (architecture 10)."""

from flax import nnx

from dsv41_jax.block import Block
from dsv41_jax.config import WINDOW, Config, LayerPlan
from dsv41_jax.linear import Linear, QuantizedLinear
from dsv41_jax.norm import RMSNorm


class MarkovHead(nnx.Module):
    def __init__(self, cfg: Config):
        self.embed = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))
        self.head = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))


class ConfidenceHead(nnx.Module):
    def __init__(self, cfg: Config):
        self.proj = Linear(1, cfg.hidden_size + cfg.dspark_markov_rank, ("heads", "width"))


class DraftStage(Block):
    """A window-only block with experts of its own; the first stage fuses the input, the last one has the heads."""

    def __init__(self, cfg: Config, stage: int):
        plan = LayerPlan(cfg.num_hidden_layers + stage, WINDOW, 0)
        super().__init__(cfg, plan, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok)
        if stage == 0:
            features = len(cfg.dspark_target_layer_ids) * cfg.hidden_size
            self.main_proj = QuantizedLinear(cfg.hidden_size, features, ("width", "hidden"))
            self.main_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if stage == cfg.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.markov_head = MarkovHead(cfg)
            self.confidence_head = ConfidenceHead(cfg)
