"""`dsv41 generate`, `logits`, `demo`: what runs a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import click
import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cli import prompt_of
from dsv41_jax.cli.options import Count, Load, check_writable, load_model, model_options, prefill_option, seed_option
from dsv41_jax.cli.show import plan_table
from dsv41_jax.cli.terminal import note, say, show, waiting
from dsv41_jax.config import Config
from dsv41_jax.engine.sampling import Sampling
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.files.arrays import to_host, write_npz
from dsv41_jax.files.checkpoint import open_checkpoint
from dsv41_jax.files.directory import locate
from dsv41_jax.measure import StepClock
from dsv41_jax.model import Model
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.transformer import Call, Transformer, abstract_parameters
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels.formats import GROUP


@click.command()
@click.argument("ckpt")
@click.option("--prompt", required=True, help="text, taken as it is behind a BOS; - reads standard input, @FILE a file")
@click.option("--max-new-tokens", default=64, show_default=True, type=Count(), help="as 4096 or 4k")
@click.option("--temperature", default=0.0, show_default=True, help="0: greedy")
@click.option("--top-p", default=1.0, show_default=True)
@seed_option
@click.option("--draft", is_flag=True, help="let the drafter guess ahead; the output keeps its distribution")
@click.option(
    "--cost", type=click.Path(path_type=Path), help="with --draft: cost table of `dsv41 profile`, verify what pays"
)
@prefill_option
@model_options
def generate(ckpt: str, prompt: str, draft: bool, cost: Path | None, prefill: str, load: Load, **sampling: Any) -> None:
    """Continue a text, streaming it to stdout."""
    if cost is not None and not draft:
        raise click.UsageError("--cost chooses how many drafts to verify: it needs --draft")
    Sampling(eos=0, **sampling)  # refuses what it cannot draw with
    text, table = prompt_of(prompt), None if cost is None else CostTable.read(cost)
    model = load(ckpt)
    with waiting("prefill") as spinner:
        stream_text(model, text, on_first=spinner.stop, draft=draft, cost=table, prefill=prefill, **sampling)


def stream_text(
    model: Model, prompt: str, *, on_first: Callable[[], None], max_new_tokens: int, draft: bool = False, **how: Any
) -> None:
    """Write a continuation to stdout token by token, and its speed to stderr. Bytes that are not text yet wait."""
    from tokenizers.decoders import DecodeStream  # not for `--help`

    accepted: list[int] = []
    stream, clock, written = DecodeStream(skip_special_tokens=True), StepClock(), 0

    def write(_: int, token: int) -> None:
        nonlocal written
        if not written:
            on_first()
        if not written or not draft:
            clock.step(1)
        written += 1
        say(stream.step(model.tokenizer, token) or "", end="")  # type: ignore[arg-type]

    def count(_: np.ndarray, stands: np.ndarray) -> None:
        accepted.extend(stands.tolist())
        clock.step(1 + int(stands.sum()))

    try:
        model.generate([prompt], max_new_tokens, on_token=write, on_step=count, draft=draft, **how)
    finally:
        clock.close()
    say("")
    if clock.rate is not None:
        device = jax.devices()[0].device_kind
        note(f"{written} tokens, {clock.rate:.1f} tokens/s in the steps that compiled nothing, on {device}")
    if accepted:
        note(f"{np.mean(accepted):.2f} of the drafts accepted a step, {len(accepted)} steps")


@click.command()
@click.argument("ckpt")
@click.option("--tokens", type=click.Path(dir_okay=False), help=".npz with an integer array `tokens` [B, T]")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help=".npz to write: `logits` [B, T, V] and the taps"
)
@click.option(
    "--taps",
    default="",
    help="comma-separated names of intermediates, e.g. layers.3.out,layers.3.index_topk; `list` prints them all",
)
@model_options
def logits(ckpt: str, tokens: str | None, out: Path | None, taps: str, load: Load) -> None:
    """Write the logits of token ids to a file, with any intermediates; the file is complete or absent."""
    if taps == "list":
        cfg = Config.flash() if ckpt == "flash" else open_checkpoint(ckpt, headers_only=True).config
        say("\n".join(tap_names(cfg)))
        return
    if tokens is None or out is None:
        raise click.UsageError(f"Missing option '{'--tokens' if tokens is None else '--out'}'.")
    check_writable(out)
    ids = read_tokens(tokens)
    model = load(ckpt)
    with waiting("forward pass"):
        values, _, seen = model(ids, taps=[name for name in taps.split(",") if name])
        arrays = {name: to_host(value) for name, value in {"logits": values, **seen}.items()}
    write_npz(out, arrays)
    note(f"{out}: " + ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()))


def read_tokens(path: str) -> np.ndarray:
    """The array `tokens` of an .npz file."""
    try:
        with np.load(path) as file:
            return file["tokens"]
    except KeyError:
        raise click.ClickException(f"{path}: has no array `tokens`") from None
    except (OSError, ValueError, EOFError, BadZipFile, TypeError, AttributeError) as error:
        raise click.ClickException(f"{path}: is not an .npz file ({error})") from None


def tap_names(cfg: Config) -> list[str]:
    """The names of all intermediates of a config's models, in the order of the forward pass, from shapes alone."""
    numerics, names = numerics_by_name("float32"), list[str]()
    lead, capacity = (1, 1, cfg.engram_columns), cfg.max_position_embeddings

    def forward(params: Transformer) -> None:
        rows = EngramRows(
            jnp.zeros((*lead, cfg.engram_head_dim), jnp.uint8),
            jnp.zeros((*lead, cfg.engram_head_dim // GROUP), jnp.uint8),
            jnp.zeros(lead, jnp.int32),
        )
        call = Call(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), (rows,) * len(cfg.engram_layer_ids))
        names.extend(params(call, init_cache(cfg, 1, capacity, numerics), cfg=cfg, numerics=numerics).taps)

    jax.eval_shape(forward, abstract_parameters(cfg))
    return names


@click.command()
def demo() -> None:
    """The bundled checkpoint: its layer plan, the parity of its logits with the released program's, a generation."""
    model = load_model("tiny", "float32")
    show(plan_table(model.config))
    with waiting("prefill and decode"):
        error, largest, positions = demo_parity(model, locate("tiny"))
    say(f"\nLogits in float32 against the released program's, {positions} positions, prefill and decode:")
    say(f"largest absolute difference {error:.1e} (logits reach {largest:.1f})\n")
    if not error <= 1e-4:
        raise click.ClickException(f"logits differ from the released program's by {error:.1e}, more than 1e-4")
    say("Greedy continuation of 'The cafe' (the weights are random, and so is the text):")
    with waiting("generation") as ready:
        stream_text(model, "The cafe", max_new_tokens=48, on_first=ready.stop)


def demo_parity(model: Model, directory: Path) -> tuple[float, float, int]:
    """(largest difference, largest golden logit, positions compared) of golden case `b`, teacher forced."""
    inputs, golden = np.load(directory / "inputs.npz"), np.load(directory / "outputs_float32.npz")
    ids, prefill = inputs["b_ids"], int(inputs["b_prefill_len"])
    cache, found = model.init_cache(ids.shape[0], ids.shape[1]), []
    for piece in (ids[:, :prefill], *(ids[:, at : at + 1] for at in range(prefill, ids.shape[1]))):
        logits, cache, _ = model.step(piece, cache)
        found.append(np.asarray(logits))
    wanted = np.concatenate([golden["b/prefill_logits"], golden["b/decode_logits"]], axis=1)
    difference = np.abs(np.concatenate(found, axis=1) - wanted)
    return float(difference.max()), float(np.abs(wanted).max()), wanted.shape[0] * wanted.shape[1]
