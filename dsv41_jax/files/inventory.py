"""What a checkpoint of a config holds, from shapes alone: parameters and bytes by part, and which shard holds what.

Counts are of logical parameters: two for a byte of packed FP4, none for a scale. `decode` and `prefill` are those that
one generated and one prompt token use: embedding and Engram rows are looked up and not counted.
"""

import math
import re
from collections import Counter

from jax.sharding import AbstractMesh, Mesh

from dsv41_jax.config import Config
from dsv41_jax.files.expected import Expected, flat_parameters
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.sharding import dotted, placements


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to."""
    for pattern, part in (
        (r"(vision|aligner)\.|image_", "vision"),
        (r"mtp\.\d+\.ffn\.experts\.", "draft experts"),
        (r"mtp\.", "draft"),
        (r".*\.engram\.embed\.", "engram tables"),
        (r".*\.engram\.", "engram"),
        (r".*\.ffn\.experts\.", "routed experts"),
        (r".*\.ffn\.shared_experts\.", "shared experts"),
        (r".*\.ffn\.gate\.", "router"),
        (r".*\.attn\.", "attention"),
        (r".*\.hc_", "hyper-connections"),
        (r"(embed|head)\.", "embedding and head"),
    ):
        if re.match(pattern, name):
            return part
    return "norms"


def parameters(tensor: Expected, name: str) -> int:
    """Logical parameters of a tensor."""
    return 0 if name.endswith(".scale") else math.prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)


def totals(expected: dict[str, Expected]) -> tuple[Counter[str], Counter[str]]:
    """(parameters, bytes) of each part."""
    counts, sizes = Counter[str](), Counter[str]()
    for name, tensor in expected.items():
        counts[part_of(name)] += parameters(tensor, name)
        sizes[part_of(name)] += tensor.nbytes
    return counts, sizes


def device_bytes(params: Transformer, mesh: Mesh | AbstractMesh) -> Counter[str]:
    """Bytes of each part's parameters on one device of a mesh, which needs no devices; Engram tables come on top.
    Raises ValueError when something does not divide."""
    sizes = Counter[str]()
    where = placements(params, mesh)
    for path, leaf in flat_parameters(params).items():
        share = math.prod(where[path].shard_shape(leaf.shape))
        sizes[part_of(dotted(path))] += share * leaf.dtype.itemsize
    return sizes


def table_bytes(cfg: Config, placement: str, devices: int) -> tuple[int, int]:
    """Bytes of the Engram tables (on each device, in host memory): a row is its values and a scale for every 32."""
    row = cfg.engram_head_dim + cfg.engram_head_dim // 32
    whole = sum(cfg.engram_num_embeddings) * row
    share = sum(-(-rows // devices) for rows in cfg.engram_num_embeddings) * row
    return {"mmap": (0, 0), "host": (0, whole), "device": (whole, 0), "sharded": (share, 0)}[placement]


def active(expected: dict[str, Expected], cfg: Config) -> tuple[int, int]:
    """(decode, prefill) parameters that a token uses: all layers and the head; or the layers below the last Full one
    and that layer's main KV and index keys, since the layers above compress nothing of their own."""
    cut = max(cfg.kv_source_layer_ids, default=cfg.num_hidden_layers)
    decode = prefill = 0
    for name, tensor in expected.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        count = parameters(tensor, name)
        if layer is None or part_of(name) == "engram tables":
            decode += count if name == "head.weight" else 0
            continue
        if part_of(name) == "routed experts":
            # All experts are of one size: the active share is that of the first few.
            used = int(re.search(r"experts\.(\d+)", name)[1]) < cfg.num_experts_per_tok
            decode += count if used else 0
            prefill += count if used and int(layer[1]) < cut else 0
            continue
        decode += count
        published = re.search(r"attn\.(compressor\.|indexer\.(wk|k_norm)\.)", name) is not None
        if int(layer[1]) < cut or (int(layer[1]) == cut and published):
            prefill += count
    return decode, prefill


def shard_of(name: str, cfg: Config) -> int:
    """The released placement, from 1: vision; embedding and delimiters; each layer; head and norm; each draft stage;
    each layer's Engram."""
    layers, drafts = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    if re.match(r"(vision|aligner)\.", name):
        return 1
    if name == "embed.weight" or name.startswith("image_"):
        return 2
    block = re.match(r"(layers|mtp)\.(\d+)\.(engram\.)?", name)
    if block is None:
        return 3 + layers
    number = int(block[2])
    if block[1] == "mtp":
        return 4 + layers + number
    if block[3]:
        return 4 + layers + drafts + cfg.engram_layer_ids.index(number)
    return 3 + number


def shard_file(name: str, cfg: Config) -> str:
    """The file of a tensor in the released placement."""
    count = 3 + cfg.num_hidden_layers + cfg.num_nextn_predict_layers + len(cfg.engram_layer_ids)
    return f"model-{shard_of(name, cfg):05d}-of-{count:05d}.safetensors"


def misplaced(placed: dict[str, str], cfg: Config) -> list[str]:
    """Tensors of a sharded checkpoint that stand in another shard than in the released placement. A single file has no
    placement."""
    if len(set(placed.values())) < 2:
        return []
    wanted = {name: shard_file(name, cfg) for name in placed}
    return [
        f"{name}: stands in {file}, the released placement is {wanted[name]}"
        for name, file in placed.items()
        if file != wanted[name]
    ]
