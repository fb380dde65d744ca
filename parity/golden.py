"""Golden vectors: a checkpoint and what the released program computed with it, for any topology.

A directory holds the checkpoint, `inputs.npz` and an `outputs_NAME.npz` for each numerics; its keys are
`CASE/ARRAY`. Each case is one prefill call, then decode steps, teacher forced. float32 arrays are judged at 1e-4 and
selections as sets. The released numerics are chaotic end to end (a last-bit change moves logits by 0.2 to 0.4 in
relative L2 through routing flips), so only the stable case `e` is judged there, layer by layer, against the noise
that `oracle_report.json` states for each row.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from dsv41_jax import Cache, Model
from parity.table import FAIL, NOT_JUDGED, NOT_RUN, PASS, Row, compare, compare_equal, compare_sets, place, relative_l2

TOLERANCE = 1e-4
CACHE_TOLERANCE = 1e-5  # `a` of outputs_cachequant: no rounding of a stored entry stands at a tie there
FILES = {"float32": "outputs_float32", "cachequant": "outputs_cachequant", "reference": "outputs_quantized"}
_CACHE_LEAVES = {
    "window_kv": "window", "compress_kv": "main", "index_k": "index_keys", "kv_state": "open_kv",
    "score_state": "open_gate",
}  # fmt: skip
_DRAFTS = ("spec_", "mtp.", "cache_after_spec0.")


class Case:
    """One case run by the model: logits and taps of the prefill, its cache, decode logits, the last cache."""

    def __init__(self, model: Model, ids: np.ndarray, prefill: int, taps: list[str]):
        batch, total = ids.shape
        self.cfg, self.ids, self.prefill, self.total = model.config, ids, prefill, total
        cache = model.init_cache(batch, total)
        logits, cache, seen = model.step(ids[:, :prefill], cache, taps=taps)
        self.arrays = {name: np.asarray(value, _host_dtype(value)) for name, value in seen.items()}
        self.arrays["prefill_logits"] = np.asarray(logits)
        self.caches = {"cache": _host(cache)}
        steps = []
        for position in range(prefill, total):
            logits, cache = model.step(ids[:, position : position + 1], cache)
            steps.append(np.asarray(logits))
        if steps:
            self.arrays["decode_logits"] = np.concatenate(steps, axis=1)
        self.caches["cache_end"] = _host(cache)

    def cache_leaf(self, key: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """(our leaf, mask of live rows) for a key like `cache.layers.1.index_k`, cut to the golden rows."""
        when, _, layer, leaf = key.split(".")
        length = self.prefill if when == "cache" else self.total
        array = getattr(self.caches[when].layers[int(layer)], _CACHE_LEAVES[leaf])[:, : shape[1]]
        ratio = max(self.cfg.layers[int(layer)].ratio, 1)
        live = {"window_kv": length, "kv_state": length % ratio, "score_state": length % ratio}
        return array, np.arange(array.shape[1]) < live.get(leaf, length // ratio)


def _host_dtype(value: jax.Array) -> np.dtype:
    """NumPy's own dtype for what is compared: bfloat16 becomes float32."""
    return np.dtype(np.float32) if value.dtype.name == "bfloat16" else np.dtype(value.dtype)


def _host(cache: Cache) -> Cache:
    return jax.tree.map(lambda leaf: np.asarray(leaf, _host_dtype(leaf)), cache)


def _tap_of(array: str) -> str | None:
    """The tap behind a golden array, if it is one."""
    name = array.removesuffix("[-3:]")
    if name == "engram_hash_ids" or name.endswith("_logits") or name.startswith((*_DRAFTS, "margin.", "cache")):
        return None
    return re.sub(r"\.candidates$", ".candidate_blocks", name)


def _pool_mask(blocks: np.ndarray, size: int, shape: tuple[int, ...], ratio: int) -> np.ndarray:
    """Candidate blocks as a mask of visible entries, which is what both programs agree on."""
    entry = np.arange(shape[-1])
    inside = (blocks[..., None] == entry // size).any(axis=-2)
    return inside & (entry < ((np.arange(shape[1]) + 1) // ratio)[:, None])


def _judge(case: str, array: str, run: Case, golden: np.ndarray, bound: float) -> Row:
    """A float32 array, a selection or a cache leaf of a case that ran."""
    if array.startswith("margin."):
        return Row(case, array, "", "", NOT_JUDGED, "a gap between golden scores, not an output")
    if array.startswith(_DRAFTS) or ".mtp." in array:
        return Row(case, array, "", "", NOT_RUN, "drafts")
    if array.startswith("cache"):
        got, live = run.cache_leaf(array, golden.shape)
        return compare(case, array, got[:, live], golden[:, live], bound)
    name = array.removesuffix("[-3:]")
    if name == "engram_hash_ids":
        layers = [run.arrays[f"layers.{layer}.engram_hash_ids"] for layer in run.cfg.engram_layer_ids]
        return compare_equal(case, array, np.stack(layers, axis=2), golden)
    if name.endswith(".candidates"):
        layer = run.cfg.layers[int(name.split(".")[1])]
        blocks = run.arrays[f"layers.{layer.id}.candidate_blocks"]
        ours = _pool_mask(blocks, run.cfg.candidate_block_size, golden.shape, layer.ratio)
        seen = np.arange(golden.shape[-1]) < ((np.arange(golden.shape[1]) + 1) // layer.ratio)[:, None]
        return compare_equal(case, array, ours, golden & seen)
    got = run.arrays[name]
    if name.endswith((".moe_experts", ".index_topk")):
        return compare_sets(case, array, got, golden)
    return compare(case, array, got[:, -3:] if array.endswith("[-3:]") else got, golden, bound)


def _judge_noise(case: str, array: str, run: Case, golden: np.ndarray, noise: list[float]) -> Row:
    """Released numerics: relative L2 of each row against the noise stated for it; sublayer outputs, which lack the
    residual's averaging, at the 1.5 times of the house rule for bfloat16."""
    if array == "engram_hash_ids" or array.startswith(_DRAFTS):
        return _judge(case, array, run, golden, TOLERANCE)
    if golden.dtype != np.float32:
        row = _judge(case, array, run, golden, TOLERANCE)
        return Row(case, array, row.error, row.where, NOT_JUDGED, "chaotic: routing flips")
    factor = 1.5 if array.endswith(("attn_out", "ffn_out", "latent")) else 1.0
    error = relative_l2(run.arrays[array], golden)
    bound = factor * np.array(noise)
    worst = int((error / bound).argmax())
    rule = f"relative L2 <= {bound[worst]:.3f}, {factor:g} x stated noise"
    verdict = PASS if (error <= bound).all() else FAIL
    if case != "e":
        verdict, rule = NOT_JUDGED, "chaotic: routing flips"
    return Row(case, array, f"{error[worst]:.2e}", place((np.intp(worst),)), verdict, rule)


def _judge_rows(case: str, array: str, run: Case, golden: np.ndarray) -> Iterator[Row]:
    """Quantized caches: one FP8 rounding at a tie decides all that follows in its row. Case `a` has none; of the
    others each row is told how far it agrees."""
    if case == "a":
        yield compare(case, array, run.arrays[array], golden, CACHE_TOLERANCE)
        return
    for row, (got, wanted) in enumerate(zip(run.arrays[array], golden, strict=True)):
        error = np.abs(got - wanted).max(axis=-1)
        off = np.flatnonzero(error > TOLERANCE)
        until = f"first off at position {off[0]}" if off.size else "agrees throughout"
        yield Row(case, f"{array} row {row}", f"{error.max():.2e}", place((error.argmax(),)), NOT_JUDGED, until)


def _cases(outputs: dict[str, np.ndarray]) -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for key in outputs:
        case, array = key.split("/", 1)
        cases.setdefault(case, []).append(array)
    return cases


def compare_directory(directory: Path) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) for each numerics that the directory has outputs of."""
    inputs = dict(np.load(directory / "inputs.npz"))
    report = json.loads((directory / "oracle_report.json").read_text())
    for numerics, file in FILES.items():
        path = directory / f"{file}.npz"
        if not path.exists():
            continue
        outputs = dict(np.load(path))
        model = Model.from_pretrained(directory, numerics=numerics)
        rows = []
        for case, arrays in _cases(outputs).items():
            if f"{case}_token_types" in inputs:
                rows += [Row(case, array, "", "", NOT_RUN, "images") for array in arrays]
                continue
            run = _run(model, case, arrays, inputs)
            for array in arrays:
                golden = outputs[f"{case}/{array}"]
                if numerics == "cachequant":
                    rows += _judge_rows(case, array, run, golden)
                elif numerics == "reference":
                    noise = report["quantized_noise_relL2_per_row"][case]
                    rows.append(_judge_noise(case, array, run, golden, noise[: len(run.ids)]))
                else:
                    rows.append(_judge(case, array, run, golden, TOLERANCE))
        yield f"{directory.name}: {numerics}", rows


def _run(model: Model, case: str, arrays: list[str], inputs: dict[str, np.ndarray]) -> Case:
    ids = inputs[f"{case}_ids"]
    taps = [tap for array in arrays if (tap := _tap_of(array)) is not None]
    if "engram_hash_ids" in arrays:
        taps += [f"layers.{layer}.engram_hash_ids" for layer in model.config.engram_layer_ids]
    key = f"{case}_prefill_len"
    return Case(model, ids, int(inputs[key]) if key in inputs else ids.shape[1], taps)
