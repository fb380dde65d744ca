"""What every test shares: checked annotations, strict dtype promotion, and three models that are compiled once."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 4)

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["dsv41_jax", "pallas_kernels"], "beartype.beartype")

import copy  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from dsv41_jax import Config, Model  # noqa: E402
from dsv41_jax.engine import chunks  # noqa: E402

ROOT = Path(__file__).parent.parent
GOLDEN = {"tiny-full": ROOT / "dsv41_jax/data/tiny", "text-min": ROOT / "tests/golden/text-min"}
CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()
UNITS = ROOT / "tests/golden/units/units.npz"


def pytest_configure(config: pytest.Config) -> None:
    """One compilation cache for all processes of a run, gone with it: a program is compiled once, whoever needs it."""
    if not hasattr(config, "workerinput"):
        config.stash[CACHE] = tempfile.TemporaryDirectory(prefix="dsv41-jax-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[CACHE].name  # for workers, and processes of tests
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that started the run takes the cache away."""
    if CACHE in config.stash:
        config.stash[CACHE].cleanup()


def small_config(**changes: object) -> Config:
    """Five layers of every mode at width 32, Engram among them, without vision and drafts."""
    base = {
        "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8,
        "q_lora_rank": 32, "o_lora_rank": 16, "sliding_window": 8, "compress_ratios": [0, 2, 2, 1, 1],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 3, "candidate_block_size": 2, "index_topk": 4, "index_n_heads": 4,
        "n_routed_experts": 4, "engram_layer_ids": [1], "engram_num_embeddings": [434], "vision_num_hidden_layers": 0,
        "num_nextn_predict_layers": 0, "dspark_block_size": 0, "dspark_target_layer_ids": [],
        "max_position_embeddings": 4096,
    }  # fmt: skip
    return Config.tiny().replace(**(base | changes))


def random_model(cfg: Config, numerics: str = "float32", seed: int = 0) -> Model:
    """A model of random weights, Engram included."""
    return Model.random(cfg, seed, numerics=numerics)


def altered(model: Model, **parts: object) -> Model:
    """The model with other parts of its engine; what is compiled is shared."""
    other = copy.copy(model)
    other.engine = copy.copy(model.engine)
    for name, value in parts.items():
        setattr(other.engine, name, value)
    return other


def compilations(work: Callable[[], object]) -> int:
    """How many programs were made for XLA while `work` ran, whether or not the cache of the run had them compiled."""
    count, made = [], "/jax/core/compile/jaxpr_to_mlir_module_duration"
    listen = lambda name, _, **__: count.append(name) if name == made else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the workers finish together."""
    longest = (
        "model.py",
        "test_packed.py",
        "test_decode_drafted.py",
        "test_decode.py",
        "test_cache.py",
        "test_model.py",
        "test_vision.py",
    )
    items.sort(key=lambda item: item.path.name not in longest)


@pytest.fixture(scope="session")
def small() -> Model:
    """`small_config` in float32."""
    return random_model(small_config())


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The bundled checkpoint in float32."""
    return Model.from_pretrained("tiny", numerics="float32")


@pytest.fixture(scope="session")
def tiny_reference() -> Model:
    """The bundled checkpoint as released: bfloat16, FP8 activations, quantized caches."""
    return Model.from_pretrained("tiny", numerics="reference")


@pytest.fixture(scope="session")
def units() -> dict[str, np.ndarray]:
    """Vectors of single operations from the released program."""
    return dict(np.load(UNITS))


@pytest.fixture(scope="module")
def few_short_compilations():
    """Calls of 16 tokens only, for a file of replays: a prompt of 40 is three chunks, and the tests share programs."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all that it does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BUCKETS", (16,))
        yield
    jax.config.update("jax_disable_most_optimizations", False)
