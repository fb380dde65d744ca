"""`dsv41 chat`: a conversation, kept within the context."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from dsv41_jax.cli import text_of
from dsv41_jax.cli.options import Count, Load, model_options, prefill_option, seed_option
from dsv41_jax.cli.terminal import note, say, waiting
from dsv41_jax.engine.sampling import Sampling
from dsv41_jax.model import Model

LONGEST_ANSWER = 1024  # where nothing is said
Message = dict[str, Any]


@click.command()
@click.argument("ckpt")
@click.option("--message", help="one user message; without it, lines of stdin are the turns")
@click.option("--system", help="system message")
@click.option(
    "--image", "images", multiple=True, type=click.Path(exists=True), help="image file of the first user turn"
)
@click.option("--thinking/--no-thinking", default=True, show_default=True)
@click.option("--effort", type=click.Choice(["low", "high", "xhigh", "max"]), help="reasoning effort")
@click.option("--max-new-tokens", type=Count(), help="default: what fits, up to 1024")
@click.option("--temperature", type=float, help="default: what DeepSeek's encoder resolves")
@click.option("--top-p", type=float, help="default: what DeepSeek's encoder resolves")
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
    thinking: bool,
    max_new_tokens: int | None,
    load: Load,
    **options: Any,
) -> None:
    """Talk to the model; reasoning goes to stderr, answers to stdout. When the context is full the oldest turns go."""
    temperature, top_p = options["temperature"] or 0.0, 1.0 if options["top_p"] is None else options["top_p"]
    Sampling(max_new_tokens=max_new_tokens or 0, eos=0, temperature=temperature, top_p=top_p)  # refuses bad ones
    system = system and text_of("system", system)
    given = None if message is None else text_of("message", message)
    model = load(ckpt)
    encoding: dict[str, Any] = {"thinking": thinking, "reasoning_effort": effort}
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    talking = given is None and sys.stdin.isatty() and sys.stderr.isatty()
    for text in typed() if talking else lines() if given is None else [given]:
        parts = [{"type": "image", "image": image} for image in images] if len(messages) <= bool(system) else []
        turn: Message = {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
        try:
            kept, room = within_context(model, [*messages, turn], max_new_tokens, **encoding)
            content = answer(model, kept, max_new_tokens=room, **encoding, **options)
        except ValueError as error:
            if not talking:
                raise
            note(f"error: {error}")  # another turn may do better
            continue
        messages = [*kept, {"role": "assistant", "content": content}]


def lines() -> Iterator[str]:
    """The turns on standard input."""
    for line in sys.stdin:
        yield text_of("message", line.rstrip("\n"))


def typed() -> Iterator[str]:
    """The turns that somebody types behind a prompt, up to the end of the input; empty lines are none."""
    while True:
        note("> ", end="")
        line = sys.stdin.readline()
        if not line:
            note("")
            return
        if line.strip():
            yield text_of("message", line.rstrip("\n"))


def within_context(
    model: Model, messages: Sequence[Message], wanted: int | None, **encoding: Any
) -> tuple[list[Message], int]:
    """(the messages without their oldest turns, as many as must go, the length of the answer that then fits). Without
    a `wanted` length a quarter of the context is enough. Raises ValueError for a turn that does not fit alone."""
    limit, kept, dropped = model.config.max_position_embeddings, list(messages), 0
    first = int(kept[0]["role"] == "system")
    while True:
        prompt = model.codec.encode(kept, **encoding)
        size = len(model.expand_images(prompt.ids, prompt.images))
        alone = len(kept) == first + 1
        if limit - size >= (min(LONGEST_ANSWER, limit // 4) if wanted is None else wanted):
            break
        if alone and wanted is None and size < limit:
            break
        if alone:
            answered = "an answer" if wanted is None else f"{wanted} new tokens"
            raise ValueError(f"message: {size} tokens and {answered} exceed the {limit} positions of this model")
        del kept[first : first + 2]  # a question and its answer
        dropped += 1
    if dropped:
        note(f"context full: the oldest {dropped} {'turn was' if dropped == 1 else 'turns were'} dropped")
    return kept, min(LONGEST_ANSWER, limit - size) if wanted is None else wanted


def answer(
    model: Model, messages: Sequence[Message], *, reasoning_effort: str | None, max_new_tokens: int, **options: Any
) -> str:
    """Stream a reply; its content."""
    reasoning = False
    with waiting("prefill") as spinner:

        def write(kind: str, text: str) -> None:
            nonlocal reasoning
            spinner.stop()
            if kind == "content":
                if reasoning and sys.stderr.isatty():
                    note("")  # between the two, which a terminal shows together
                say(text, end="")
            else:
                note(text, end="")
            reasoning = kind != "content"

        reply = model.chat(messages, max_new_tokens, reasoning_effort=reasoning_effort, on_delta=write, **options)
    say("")
    for name, arguments in reply.tool_calls:
        say(f"call {name} {arguments}")
    return reply.content
