"""Golden vectors: a checkpoint and what the released program computed with it, for any topology.

A directory holds the checkpoint, `inputs.npz` and an `outputs_NAME.npz` for each numerics; its keys are
`CASE/ARRAY`. Each case is one prefill call, then decode steps, teacher forced. float32 arrays are judged at 1e-4 and
selections as sets. The released numerics are chaotic end to end (a last-bit change moves logits by 0.2 to 0.4 in
relative L2 through routing flips), so only the stable case `e` is judged there, layer by layer, against the noise
that `oracle_report.json` states for each row.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv41_jax import Cache, Config, Model
from dsv41_jax.engine.images import ImageSource, Patches, preprocess
from dsv41_jax.files.arrays import to_host
from dsv41_jax.nn.dspark import Drafts
from dsv41_jax.nn.vision import ImageInput
from parity.table import FAIL, NOT_JUDGED, PASS, Row, compare, compare_equal, compare_sets, place, relative_l2

TOLERANCE = 1e-4
BFLOAT16_ULP = 2.0**-7
CACHE_TOLERANCE = 1e-5  # `a` of outputs_cachequant: no rounding of a stored entry stands at a tie there
FILES = {"float32": "outputs_float32", "cachequant": "outputs_cachequant", "reference": "outputs_quantized"}
_CACHE_LEAVES = {
    "window_kv": "window", "compress_kv": "main", "index_k": "index_keys", "kv_state": "open_kv",
    "score_state": "open_gate",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaseRun:
    """One case run by the model: logits and taps of the prefill, decode logits and drafts by array name, and the caches
    on the way with the tokens that each holds."""

    cfg: Config
    ids: np.ndarray
    arrays: dict[str, np.ndarray]
    caches: dict[str, Cache]
    lengths: dict[str, int]

    def cache_leaf(self, key: str, golden: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(our rows, golden rows) of a key like `cache.layers.1.index_k`, those that are alive. Rings are compared by
        position: ours are longer, by the rows that hold drafted tokens."""
        when, part, layer, leaf = key.split(".")
        if part == "mtp":
            # The released program fills draft rings one call later than the backbone's: after forward_spec.
            when = {"cache_after_spec0": "cache", "cache_end": "drafts_end"}.get(when, "")
            if not when:
                return None
            return self._ring(
                to_host(self.caches[when].drafts[int(layer)]), golden, self.lengths[when], golden.shape[1]
            )
        state, length = self.caches[when].layers[int(layer)], self.lengths[when]
        array = to_host(getattr(state, _CACHE_LEAVES[leaf]))
        ratio = max(self.cfg.layers[int(layer)].ratio, 1)
        if leaf == "window_kv":
            return self._ring(array, golden, length, golden.shape[1])
        if leaf in ("kv_state", "score_state"):
            return self._ring(array, golden, length, length % ratio, base=length - length % ratio)
        return array[:, : length // ratio], golden[:, : length // ratio]

    @staticmethod
    def _ring(
        ours: np.ndarray, golden: np.ndarray, length: int, last: int, base: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        position = np.arange(max(0, length - last), length)
        return ours[:, position % ours.shape[1]], golden[:, (position - base) % golden.shape[1]]


def run_case(
    model: Model, name: str, inputs: dict[str, np.ndarray], taps: list[str], drafts: np.ndarray | None
) -> CaseRun:
    """Prefill, then decode steps, teacher forced; with `drafts` (ids by step) the drafter is asked behind the first of
    them."""
    ids = inputs[f"{name}_ids"]
    batch, total = ids.shape
    prefill = int(inputs[f"{name}_prefill_len"]) if f"{name}_prefill_len" in inputs else total
    arrays, image = _images(model, name, inputs, ids[:, :prefill])
    logits, cache, seen = model.step(ids[:, :prefill], model.init_cache(batch, total), taps=taps, image=image)
    arrays |= {tap: to_host(value) for tap, value in seen.items()} | {"prefill_logits": to_host(logits)}
    caches, lengths = {"cache": cache.copy()}, {"cache": prefill}
    steps: list[np.ndarray] = []
    guesses: list[tuple[np.ndarray, Drafts]] = []
    for position in range(prefill, total):
        logits, cache, _ = model.step(ids[:, position : position + 1], cache)
        steps.append(to_host(logits))
        if drafts is not None and len(guesses) < drafts.shape[1]:
            given = drafts[..., 0][:, len(guesses)].astype(np.int32)
            guesses.append((given, model.draft(given, cache)))
            caches["drafts_end"], lengths["drafts_end"] = cache.copy(), position + 1
    if steps:
        arrays["decode_logits"] = np.concatenate(steps, axis=1)
    if guesses:
        arrays["spec_ids"] = np.stack([np.column_stack([g, d.ids]) for g, d in guesses], axis=1)
        arrays["spec_logits"] = np.stack([to_host(d.logits) for _, d in guesses], axis=1)
        arrays["spec_confidence"] = np.stack([to_host(d.confidence) for _, d in guesses], axis=1)
    caches["cache_end"], lengths["cache_end"] = cache, total
    return CaseRun(cfg=model.config, ids=ids, arrays=arrays, caches=caches, lengths=lengths)


def _images(
    model: Model, name: str, inputs: dict[str, np.ndarray], ids: np.ndarray
) -> tuple[dict[str, np.ndarray], ImageInput | None]:
    """(what the tower and the aligner give for each image, the image spans of the prefill)."""
    arrays: dict[str, np.ndarray] = {}
    if f"{name}_img_row_start" not in inputs:
        return arrays, None
    of_row: list[list[ImageSource | Patches]] = [[] for _ in ids]
    for number, (row, _) in enumerate(inputs[f"{name}_img_row_start"]):
        image = preprocess(inputs[f"{name}_img{number}_rgb"], model.config)
        tower, aligned = model.engine.image_features(image)
        arrays |= {f"vit{number}": to_host(tower), f"aligned{number}": to_host(aligned)}
        arrays[f"img{number}_patches"] = image.values.astype(np.float32)
        of_row[row].append(image)
    return arrays, model.embed_images(ids, of_row)


def _tap_of(array: str) -> str | None:
    """The tap behind a golden array, if it is one."""
    name = array.removesuffix("[-3:]")
    if name != "main_hidden" and name != "final_norm" and not name.startswith("layers."):
        return None
    return re.sub(r"\.candidates$", ".candidate_blocks", name)


def _pool_mask(blocks: np.ndarray, size: int, shape: tuple[int, ...], ratio: int) -> np.ndarray:
    """Candidate blocks as a mask of visible entries, which is what both programs agree on."""
    entry = np.arange(shape[-1])
    inside = (blocks[..., None] == entry // size).any(axis=-2)
    return inside & (entry < ((np.arange(shape[1]) + 1) // ratio)[:, None])


def _judge(case: str, array: str, run: CaseRun, golden: np.ndarray, bound: float) -> Row:
    """A float32 array, a selection or a cache leaf of a case that ran."""
    if array.startswith("margin."):
        return Row(
            case=case,
            array=array,
            error="",
            where="",
            verdict=NOT_JUDGED,
            rule="a gap between golden scores, not an output",
        )
    if array.startswith("cache"):
        rows = run.cache_leaf(array, golden)
        if rows is None:
            return Row(
                case=case,
                array=array,
                error="",
                where="",
                verdict=NOT_JUDGED,
                rule="released rings are still empty here; see cache_after_spec0",
            )
        return compare(case, array, *rows, bound)
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
    if name == "spec_ids":
        return compare_equal(case, array, got, golden)
    if name.endswith((".moe_experts", ".index_topk")):
        return compare_sets(case, array, got, golden)
    return compare(case, array, got[:, -3:] if array.endswith("[-3:]") else got, golden, bound)


def _judge_noise(case: str, array: str, run: CaseRun, golden: np.ndarray, noise: list[float]) -> Row:
    """Released numerics: relative L2 of each row against the noise stated for it; sublayer outputs, which lack the
    residual's averaging, at the 1.5 times of the house rule for bfloat16."""
    if array == "engram_hash_ids":
        return _judge(case, array, run, golden, TOLERANCE)
    if golden.dtype != np.float32:
        row = _judge(case, array, run, golden, TOLERANCE)
        return Row(
            case=case, array=array, error=row.error, where=row.where, verdict=NOT_JUDGED, rule="chaotic: routing flips"
        )
    factor = 1.5 if array.endswith(("attn_out", "ffn_out", "latent")) else 1.0
    error = relative_l2(run.arrays[array], golden)
    bound = factor * (np.array(noise) if len(noise) == len(error) else np.full(len(error), max(noise)))
    worst = int((error / bound).argmax())
    rule = f"relative L2 <= {bound[worst]:.3f}, {factor:g} x stated noise"
    verdict = PASS if (error <= bound).all() else FAIL
    if array.startswith("aligned"):  # nothing is routed in the vision tower
        verdict, rule = PASS if error.max() <= BFLOAT16_ULP else FAIL, "relative L2 <= 2^-7, a bfloat16 ulp"
    elif case != "e":
        verdict, rule = NOT_JUDGED, "chaotic: routing flips"
    return Row(
        case=case, array=array, error=f"{error[worst]:.2e}", where=place((np.intp(worst),)), verdict=verdict, rule=rule
    )


def _judge_rows(case: str, array: str, run: CaseRun, golden: np.ndarray) -> Iterator[Row]:
    """Quantized caches: one FP8 rounding at a tie decides all that follows in its row. Case `a` has none; of the
    others each row is told how far it agrees."""
    if case == "a":
        yield compare(case, array, run.arrays[array], golden, CACHE_TOLERANCE)
        return
    for row, (got, wanted) in enumerate(zip(run.arrays[array], golden, strict=True)):
        error = np.abs(got - wanted).max(axis=-1)
        off = np.flatnonzero(error > TOLERANCE)
        until = f"first off at position {off[0]}" if off.size else "agrees throughout"
        yield Row(
            case=case,
            array=f"{array} row {row}",
            error=f"{error.max():.2e}",
            where=place((error.argmax(),)),
            verdict=NOT_JUDGED,
            rule=until,
        )


def _cases(outputs: dict[str, np.ndarray]) -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for key in outputs:
        case, array = key.split("/", 1)
        cases.setdefault(case, []).append(array)
    return cases


def compare_directory(
    directory: Path, numerics_names: Sequence[str] = tuple(FILES), cases: Sequence[str] | None = None
) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) for each numerics that the directory has outputs of; of all its cases, or those named."""
    inputs = dict(np.load(directory / "inputs.npz"))
    report = json.loads((directory / "oracle_report.json").read_text())
    for numerics in numerics_names:
        path = directory / f"{FILES[numerics]}.npz"
        if not path.exists():
            continue
        outputs = dict(np.load(path))
        model = Model.from_pretrained(directory, numerics=numerics)
        rows: list[Row] = []
        for case, arrays in _cases(outputs).items():
            if cases is not None and case not in cases:
                continue
            run = _run(model, case, arrays, inputs, outputs.get(f"{case}/spec_ids"))
            if numerics == "float32":
                rows += _judge_preprocessing(case, run, inputs)
            for array in arrays:
                golden = outputs[f"{case}/{array}"]
                if numerics == "cachequant":
                    rows += _judge_rows(case, array, run, golden)
                elif numerics == "reference":
                    noise = report["quantized_noise_relL2_per_row"].get(case, [np.inf] * len(run.ids))
                    rows.append(_judge_noise(case, array, run, golden, noise[: len(run.ids)]))
                else:
                    rows.append(_judge(case, array, run, golden, TOLERANCE))
        yield f"{directory.name}: {numerics}", rows


def _judge_preprocessing(case: str, run: CaseRun, inputs: dict[str, np.ndarray]) -> Iterator[Row]:
    """Pixels to patches, and the span's place: bit-equal."""
    for name in (name for name in run.arrays if name.endswith("_patches")):
        golden = inputs[f"{case}_{name}"]
        yield compare_equal(case, name, run.arrays[name], golden.reshape(len(golden), -1), "bit-equal")


def _run(
    model: Model, case: str, arrays: list[str], inputs: dict[str, np.ndarray], drafts: np.ndarray | None
) -> CaseRun:
    taps = [tap for array in arrays if (tap := _tap_of(array)) is not None]
    if "engram_hash_ids" in arrays:
        taps += [f"layers.{layer}.engram_hash_ids" for layer in model.config.engram_layer_ids]
    return run_case(model, case, inputs, taps, drafts)
