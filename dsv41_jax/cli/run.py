"""`dsv41 generate`, `chat`, `logits`, `demo`: what runs a model."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import click
import jax
import numpy as np

from dsv41_jax.cli import text_of
from dsv41_jax.cli.options import load_model, model_options, prefill_option, seed_option
from dsv41_jax.cli.show import plan_table
from dsv41_jax.cli.terminal import note, say, show, waiting
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.files.arrays import to_host, write_npz
from dsv41_jax.files.directory import locate
from dsv41_jax.model import Model


@click.command()
@click.argument("ckpt")
@click.option("--prompt", required=True, help="text, taken as it is behind a BOS")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0: greedy")
@click.option("--top-p", default=1.0, show_default=True)
@seed_option
@click.option("--draft", is_flag=True, help="let the drafter guess ahead; the output keeps its distribution")
@click.option("--cost", type=click.Path(path_type=Path), help="cost table of `dsv41 profile`: verify what pays")
@prefill_option
@model_options
def generate(ckpt: str, prompt: str, numerics: str, backend: str, cost: Path | None, **sampling: Any) -> None:
    """Continue a text, streaming it to stdout."""
    prompt, table = text_of("prompt", prompt), None if cost is None else CostTable.read(cost)
    model = load_model(ckpt, numerics, backend)
    with waiting("prefill") as ready:
        stream_text(model, prompt, on_first=ready.stop, cost=table, **sampling)


@click.command()
@click.argument("ckpt")
@click.option("--message", help="one user message; without it, lines of stdin are the turns")
@click.option("--system", help="system message")
@click.option("--image", "images", multiple=True, type=click.Path(), help="image file of the first user turn")
@click.option("--thinking/--no-thinking", default=True, show_default=True)
@click.option("--effort", type=click.Choice(["low", "high", "xhigh", "max"]), help="reasoning effort")
@click.option("--max-new-tokens", default=1024, show_default=True)
@click.option("--temperature", type=float, help="default: what DeepSeek's encoder resolves")
@seed_option
@click.option("--draft", is_flag=True, help="let the drafter guess ahead")
@prefill_option
@model_options
def chat(
    ckpt: str,
    message: str | None,
    system: str | None,
    images: tuple[str, ...],
    effort: str | None,
    numerics: str,
    backend: str,
    **options: Any,
) -> None:
    """Talk to the model; reasoning goes to stderr, answers to stdout."""
    system = system and text_of("system", system)
    message = message and text_of("message", message)
    model = load_model(ckpt, numerics, backend)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    turns: Iterable[str] = sys.stdin if message is None else [message]

    def write(kind: str, text: str) -> None:
        (say if kind == "content" else note)(text, end="")

    for turn in turns:
        parts = [{"type": "image", "image": image} for image in images] if len(messages) <= bool(system) else []
        text = text_of("message", turn.rstrip("\n"))
        content = [*parts, {"type": "text", "text": text}] if parts else text
        messages.append({"role": "user", "content": content})
        reply = model.chat(messages, reasoning_effort=effort, on_delta=write, **options)
        say("")
        for name, arguments in reply.tool_calls:
            say(f"call {name} {arguments}")
        messages.append({"role": "assistant", "content": reply.content})


def stream_text(
    model: Model, prompt: str, *, on_first: Callable[[], None], max_new_tokens: int, **sampling: Any
) -> None:
    """Write a continuation to stdout token by token, and its speed to stderr. Bytes that are not text yet wait."""
    from tokenizers.decoders import DecodeStream  # not for `--help`

    accepted: list[int] = []
    stream = DecodeStream(skip_special_tokens=True)
    times: list[float] = []

    def write(_: int, token: int) -> None:
        if not times:
            on_first()
        times.append(time.perf_counter())
        say(stream.step(model.tokenizer, token) or "", end="")  # type: ignore[arg-type]

    def count(_: np.ndarray, stands: np.ndarray) -> None:
        accepted.extend(stands.tolist())

    model.generate([prompt], max_new_tokens, on_token=write, on_step=count, **sampling)
    say("")
    # The first decode step compiles, so the speed is that of the steps after it.
    if len(times) > 2:
        rate = (len(times) - 2) / (times[-1] - times[1])
        note(f"{len(times)} tokens, {rate:.1f} tokens/s after compilation on {jax.devices()[0].device_kind}")
    if accepted:
        note(f"{np.mean(accepted):.2f} of the drafts accepted a step, {len(accepted)} steps")


@click.command()
@click.argument("ckpt")
@click.option(
    "--tokens", required=True, type=click.Path(dir_okay=False), help=".npz with an integer array `tokens` [B, T]"
)
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False), help=".npz to write: `logits` [B, T, V] and the taps"
)
@click.option(
    "--taps", default="", help="comma-separated names of intermediates, e.g. layers.3.out,layers.3.index_topk"
)
@model_options
def logits(ckpt: str, tokens: str, out: str, taps: str, numerics: str, backend: str) -> None:
    """Write the logits of token ids to a file, with any intermediates; the file is complete or absent."""
    try:
        with np.load(tokens) as file:
            ids = file["tokens"]
    except KeyError:
        raise click.ClickException(f"{tokens}: has no array `tokens`") from None
    except (OSError, ValueError, EOFError, BadZipFile, TypeError, AttributeError) as error:
        raise click.ClickException(f"{tokens}: is not an .npz file ({error})") from None
    if not Path(out).parent.is_dir():
        raise click.ClickException(f"{out}: its directory does not exist")
    model = load_model(ckpt, numerics, backend)
    with waiting("forward pass"):
        values, _, seen = model(ids, taps=[name for name in taps.split(",") if name])
        arrays = {name: to_host(value) for name, value in {"logits": values, **seen}.items()}
    write_npz(Path(out), arrays)
    note(f"{out}: " + ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()))


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
