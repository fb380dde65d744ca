"""`dsv41`: look at a checkpoint, generate from it, write its logits. Results on stdout, progress on stderr."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import click
import jax
import numpy as np
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from tokenizers.decoders import DecodeStream

from dsv41_jax import atomic
from dsv41_jax.config import Config
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.engine.speculate import measure_costs
from dsv41_jax.engine.tables import PLACEMENTS
from dsv41_jax.files.convert import convert_checkpoint
from dsv41_jax.files.directory import LAYOUTS, locate
from dsv41_jax.files.expected import Expected, expected_tensors
from dsv41_jax.files.inventory import active, device_bytes, misplaced, table_bytes, totals
from dsv41_jax.files.safetensors import Checkpoint
from dsv41_jax.measure import measure_context, with_positions
from dsv41_jax.model import Model
from dsv41_jax.nn.transformer import abstract_parameters
from dsv41_jax.numerics import NUMERICS
from dsv41_jax.sharding import parse as parse_mesh

STDERR = Console(stderr=True)
prefill_option = click.option(
    "--prefill",
    default="full",
    show_default=True,
    type=click.Choice(["full", "replay"]),
    help="replay: an approximation that runs the upper layers on the end of the prompt alone",
)
numerics_option = click.option(
    "--numerics", default="reference", show_default=True, type=click.Choice(list(NUMERICS)), help="arithmetic by name"
)
backend_option = click.option(
    "--backend", default="xla", show_default=True, type=click.Choice(["xla", "pallas"]), help="pallas: the GPU kernels"
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `load_model` takes."""
    return numerics_option(backend_option(command))


@contextmanager
def progress(what: str, counter: ProgressColumn) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, advanced by what it is given: done, total, the name of the newest."""
    columns = (TextColumn(what), BarColumn(), counter, TimeElapsedColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=STDERR, transient=True) as bar:
        task = bar.add_task("", total=None, name="")

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=name)

        yield advance


def load_model(path: str, numerics: str, backend: str = "xla") -> Model:
    """`Model.from_pretrained` behind a progress bar."""
    with progress("loading", MofNCompleteColumn()) as advance:
        return Model.from_pretrained(path, numerics=numerics, backend=backend, on_progress=advance)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A spinner on stderr until the body ends or calls what it is given."""
    with STDERR.status(f"{what} (the first time compiles)") as status:
        yield status.stop


def plan_table(cfg: Config) -> Table:
    """The layer plan: what each layer is and where it reads."""
    table = Table(box=None, pad_edge=False, title="Layer plan", title_justify="left")
    for heading in ("layer", "mode", "ratio", "KV from", "ids from", "candidates", "Engram", "draft feature"):
        table.add_column(heading, justify="right" if heading in ("layer", "ratio") else "left")
    for plan in cfg.layers:
        pool = "publishes" if plan.publishes_candidates else "obeys" if plan.obeys_candidates else ""
        sources = ("" if source is None else str(source) for source in (plan.kv_source, plan.index_source))
        slot = "" if plan.engram_slot is None else f"table {plan.engram_slot}"
        table.add_row(
            str(plan.id), plan.mode, str(plan.ratio), *sources, pool, slot, "yes" if plan.draft_feature else ""
        )
    return table


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsv41-jax")
def app() -> None:
    """DeepSeek-V4.1-Flash in JAX. CKPT is a checkpoint directory in the released layout, or `tiny`, the bundled one."""


@app.command()
@click.argument("ckpt")
@click.option("--mesh", "mesh_text", help="bytes on each device of a mesh, e.g. data=1,expert=8; it need not exist")
def info(ckpt: str, mesh_text: str | None) -> None:
    """Layer plan, parameters and bytes of CKPT, if all its tensors are there: from headers alone, so files may end
    behind them. `flash` is the released config, without any files."""
    mesh = None if mesh_text is None else parse_mesh(mesh_text)
    console = Console()
    if ckpt == "flash":
        cfg = Config.flash()
        expected = expected_tensors(cfg)
    else:
        checkpoint = Checkpoint(ckpt, headers_only=True)
        cfg, expected = checkpoint.config, checkpoint.check()
    shares = None if mesh is None else device_table(cfg, mesh)
    console.print(plan_table(cfg))
    console.print(parts_table(expected))
    if shares is not None:
        console.print(shares)
    decode, prefill = active(expected, cfg)
    print(f"\nparameters that a generated token uses: {decode:,}; a prompt token: {prefill:,}")
    if cfg.unknown_keys:
        print(f"config keys kept but not known: {', '.join(cfg.unknown_keys)}")


def parts_table(expected: dict[str, Expected]) -> Table:
    """Parameters and stored bytes by part."""
    counts, sizes = totals(expected)
    table = Table(box=None, pad_edge=False, title="\nParts", title_justify="left")
    for heading in ("part", "parameters", "bytes"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part in sorted(counts, key=counts.get, reverse=True):
        table.add_row(part, f"{counts[part]:,}", f"{sizes[part]:,}")
    table.add_row(f"all {len(expected):,} tensors", f"{counts.total():,}", f"{sizes.total():,}")
    return table


def device_table(cfg: Config, mesh: AbstractMesh) -> Table:
    """Bytes on each device of a mesh: the parameters by part, then the Engram tables for each of their places."""
    sizes = device_bytes(abstract_parameters(cfg), mesh)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    table = Table(box=None, pad_edge=False, title=f"\nOn each of {mesh.size} devices ({axes})", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for part, size in sizes.most_common():
        table.add_row(part, f"{size:,}")
    table.add_row("all parameters", f"{sizes.total():,}")
    for placement in PLACEMENTS if cfg.engram_layer_ids else ():
        device, host = table_bytes(cfg, placement, mesh.size)
        on_host = f", and {host:,} in host memory" if host else ""
        table.add_row(f"engram tables, {placement!r}", f"{device:,}{on_host}")
    return table


@app.command()
@click.argument("ckpt")
def verify(ckpt: str) -> None:
    """Check names, shapes, dtypes, sizes and shards of CKPT against its config: a line a deviation, then exit 1."""
    checkpoint = Checkpoint(ckpt)
    problems = checkpoint.deviations() or misplaced(checkpoint.placed, checkpoint.config)
    for problem in problems:
        print(problem)
    total = sum(tensor.stop - tensor.start for tensor in checkpoint.tensors.values())
    print(f"{checkpoint.path}: {len(checkpoint.tensors):,} tensors, {total:,} bytes, {len(problems)} deviations")
    sys.exit(1 if problems else 0)


@app.command()
@click.argument("src")
@click.argument("dst")
@click.option("--to", type=click.Choice(LAYOUTS), help="default: the layout that SRC is not in")
@click.option("--overwrite", is_flag=True, help="replace the checkpoint DST once the new one is complete")
def convert(src: str, dst: str, to: str | None, overwrite: bool) -> None:
    """Write checkpoint SRC as DST: from the released layout to Orbax, or from Orbax back, byte for byte."""
    with progress("converting", DownloadColumn()) as advance:
        convert_checkpoint(src, dst, to, overwrite=overwrite, on_progress=advance)
    STDERR.print(f"{dst}: complete")


@app.command()
@click.argument("ckpt")
@click.option("--prompt", required=True, help="text, taken as it is behind a BOS")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0: greedy")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--draft", is_flag=True, help="let the drafter guess ahead; the output keeps its distribution")
@click.option("--cost", type=click.Path(path_type=Path), help="cost table of `dsv41 profile`: verify what pays")
@prefill_option
@model_options
def generate(ckpt: str, prompt: str, numerics: str, backend: str, cost: Path | None, **sampling: Any) -> None:
    """Continue a text, streaming it to stdout."""
    table = None if cost is None else CostTable.read(cost)
    model = load_model(ckpt, numerics, backend)
    with waiting("prefill") as ready:
        stream_text(model, prompt, on_first=ready, cost=table, **sampling)


@app.command()
@click.argument("ckpt")
@click.option("--message", help="one user message; without it, lines of stdin are the turns")
@click.option("--system", help="system message")
@click.option("--image", "images", multiple=True, type=click.Path(), help="image file of the first user turn")
@click.option("--thinking/--no-thinking", default=True, show_default=True)
@click.option("--effort", type=click.Choice(["low", "high", "xhigh", "max"]), help="reasoning effort")
@click.option("--max-new-tokens", default=1024, show_default=True)
@click.option("--temperature", type=float, help="default: what DeepSeek's encoder resolves")
@click.option("--seed", default=0, show_default=True)
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
    model = load_model(ckpt, numerics, backend)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    turns: Iterable[str] = sys.stdin if message is None else [message]

    def write(kind: str, text: str) -> None:
        stream = sys.stdout if kind == "content" else sys.stderr
        stream.write(text)
        stream.flush()

    for turn in turns:
        parts = [{"type": "image", "image": image} for image in images] if len(messages) <= bool(system) else []
        text = turn.rstrip("\n")
        content = [*parts, {"type": "text", "text": text}] if parts else text
        messages.append({"role": "user", "content": content})
        reply = model.chat(messages, reasoning_effort=effort, on_delta=write, **options)
        sys.stdout.write("\n")
        for name, arguments in reply.tool_calls:
            sys.stdout.write(f"call {name} {arguments}\n")
        messages.append({"role": "assistant", "content": reply.content})


@app.command()
@click.argument("ckpt")
@click.option("--batch", default=1, show_default=True, help="sequences decoded together")
@click.option("--repeats", default=5, show_default=True, help="the median of so many runs counts")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON file to write")
@model_options
def profile(ckpt: str, batch: int, repeats: int, out: Path, numerics: str, backend: str) -> None:
    """Measure what verifying and drafting cost on this machine, for `generate --cost`."""
    model = load_model(ckpt, numerics, backend)
    with waiting("measuring"):
        table = measure_costs(model, batch, repeats)
    table.write(out)
    rows = Table("tokens a step", "milliseconds", box=None, pad_edge=False)
    for tokens, seconds in zip(table.tokens, table.verify, strict=True):
        rows.add_row(str(tokens), f"{1e3 * seconds:.2f}")
    rows.add_row("drafting", f"{1e3 * table.draft:.2f}")
    Console().print(rows)


def lengths_of(text: str) -> list[int]:
    """Comma-separated numbers of tokens. Raises ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"tokens: {text!r} is not a comma-separated list of numbers of at least 1")
    return [int(part) for part in parts]


@app.command()
@click.argument("ckpt")
@click.option(
    "--tokens", default="1024,8192,65536", show_default=True, help="comma-separated lengths, short ones first"
)
@click.option("--decode", default=64, show_default=True, help="tokens decoded behind each")
@model_options
def context(ckpt: str, tokens: str, decode: int, numerics: str, backend: str) -> None:
    """Measure time a token and peak memory at lengths of context, past the config's limit too."""
    lengths = lengths_of(tokens)
    model = with_positions(load_model(ckpt, numerics, backend), max(lengths) + decode)
    table = Table(box=None, pad_edge=False)
    for heading in ("tokens", "prefill s", "ms a token", "decode ms a token", "global cache", "peak memory so far"):
        table.add_column(heading, justify="right")
    for length in lengths:
        with waiting(f"{length} tokens"):
            cost = measure_context(model, length, decode)
        times = (f"{cost.prefill:.1f}", f"{1e3 * cost.prefill / length:.2f}", f"{1e3 * cost.decode:.1f}")
        table.add_row(str(length), *times, f"{cost.cache / 1e6:.2f} MB", f"{cost.peak / 1e9:.2f} GB")
    Console().print(table)


def stream_text(
    model: Model, prompt: str, *, on_first: Callable[[], None], max_new_tokens: int, **sampling: Any
) -> None:
    """Write a continuation to stdout token by token, and its speed to stderr. Bytes that are not text yet wait."""
    accepted: list[int] = []
    stream = DecodeStream(skip_special_tokens=True)
    times: list[float] = []

    def write(_: int, token: int) -> None:
        if not times:
            on_first()
        times.append(time.perf_counter())
        sys.stdout.write(stream.step(model.tokenizer, token) or "")
        sys.stdout.flush()

    def count(_: np.ndarray, stands: np.ndarray) -> None:
        accepted.extend(stands.tolist())

    model.generate([prompt], max_new_tokens, on_token=write, on_step=count, **sampling)
    sys.stdout.write("\n")
    # The first decode step compiles, so the speed is that of the steps after it.
    if len(times) > 2:
        rate = (len(times) - 2) / (times[-1] - times[1])
        STDERR.print(f"{len(times)} tokens, {rate:.1f} tokens/s after compilation on {jax.devices()[0].device_kind}")
    if accepted:
        STDERR.print(f"{np.mean(accepted):.2f} of the drafts accepted a step, {len(accepted)} steps")


@app.command()
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
        values, seen = model(ids, taps=[name for name in taps.split(",") if name])
        arrays = {name: to_host(value) for name, value in {"logits": values, **seen}.items()}
    write_npz(Path(out), arrays)
    STDERR.print(f"{out}: " + ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()))


def to_host(value: jax.Array) -> np.ndarray:
    """As NumPy's own dtypes can hold it: bfloat16 becomes float32."""
    return np.asarray(value, np.float32 if value.dtype.name == "bfloat16" else value.dtype)


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all: a reader never sees half a file, and a failure leaves the old one."""
    with atomic.file(path) as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


@app.command()
def demo() -> None:
    """The bundled checkpoint: its layer plan, the parity of its logits with the released program's, a generation."""
    model = load_model("tiny", "float32")
    Console().print(plan_table(model.config))
    with waiting("prefill and decode"):
        error, largest, positions = demo_parity(model, locate("tiny"))
    print(f"\nLogits in float32 against the released program's, {positions} positions, prefill and decode:")
    print(f"largest absolute difference {error:.1e} (logits reach {largest:.1f})\n")
    if not error <= 1e-4:
        raise click.ClickException(f"logits differ from the released program's by {error:.1e}, more than 1e-4")
    print("Greedy continuation of 'The cafe' (the weights are random, and so is the text):")
    with waiting("generation") as ready:
        stream_text(model, "The cafe", max_new_tokens=48, on_first=ready)


def demo_parity(model: Model, directory: Path) -> tuple[float, float, int]:
    """(largest difference, largest golden logit, positions compared) of golden case `b`, teacher forced."""
    inputs, golden = np.load(directory / "inputs.npz"), np.load(directory / "outputs_float32.npz")
    ids, prefill = inputs["b_ids"], int(inputs["b_prefill_len"])
    cache = model.init_cache(ids.shape[0], ids.shape[1])
    first, cache = model.step(ids[:, :prefill], cache)
    found = [np.asarray(first)]
    for position in range(prefill, ids.shape[1]):
        one, cache = model.step(ids[:, position : position + 1], cache)
        found.append(np.asarray(one))
    wanted = np.concatenate([golden["b/prefill_logits"], golden["b/decode_logits"]], axis=1)
    difference = np.abs(np.concatenate(found, axis=1) - wanted)
    return float(difference.max()), float(np.abs(wanted).max()), wanted.shape[0] * wanted.shape[1]


def main(arguments: list[str] | None = None) -> None:
    """The entry point: whatever the input, an error is one line on stderr and exit status 2."""
    try:
        app.main(arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        fail(error.format_message())
    except (ValueError, OSError, NotImplementedError) as error:
        fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 130)


def fail(message: str, status: int = 2) -> None:
    """One line on stderr, then exit."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
