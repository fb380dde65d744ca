"""Prompts and completions against vectors made with DeepSeek's own package and the released tokenizer."""

import hashlib
import io
import itertools
import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from dsv41_jax import Config
from dsv41_jax.engine.chat import ChatError, Codec, released_tokenizer
from dsv41_jax.engine.ngrams import compressed_ids

PROMPTS = json.loads((ROOT / "tests/golden/chat/prompt_fixtures.json").read_text(encoding="utf-8"))
COMPLETIONS = json.loads((ROOT / "tests/golden/chat/parse_fixtures.json").read_text(encoding="utf-8"))
CALL = COMPLETIONS["tool_text"]


@pytest.fixture(scope="module")
def tokenizer():
    return released_tokenizer()


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Codec(tokenizer)


def outcome(reply):
    return reply.content, reply.reasoning, reply.finish_reason, reply.tool_calls


def wanted(result):
    calls = [tuple(call[:2]) for call in result["tool_calls"]]
    return result["content"], result["reasoning"], result["finish"], calls


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_text_and_ids_equal_the_published_encoder(codec, name):  # V4's template, JSON spacing, order of results
    body = dict(PROMPTS[name]["body"])
    thinking = body.pop("thinking", {"type": "enabled"})["type"] == "enabled"
    prompt = codec.encode(body.pop("messages"), thinking=thinking, **{k: v for k, v in body.items() if k != "model"})
    assert prompt.text == PROMPTS[name]["prompt"]
    assert prompt.ids == PROMPTS[name]["ids"]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_parses_as_published(codec, name):
    case = COMPLETIONS[name]
    assert outcome(codec.parse(case["text"], thinking=case["thinking"], tools=case["tools"])) == wanted(case["result"])


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_parses_the_same_from_every_split_in_two_and_any_chunk_size(codec, name):  # tags cut in two leak
    case = COMPLETIONS[name]
    text = case["text"]
    splits = [(text[:at], text[at:]) for at in range(1, len(text))]
    splits += [[text[i : i + size] for i in range(0, len(text), size)] for size in (1, 2, 3, 7, 17)]
    for pieces in splits:
        parser = codec.text_parser(thinking=case["thinking"], tools=case["tools"])
        for piece in pieces:
            parser.push_text(piece)
        assert outcome(parser.finish()) == wanted(case["result"]), pieces


def test_completion_streamed_as_tokens_parses_the_same(codec, tokenizer):
    body = {"tools": PROMPTS["tools_think"]["body"]["tools"]}
    prompt = codec.encode([{"role": "user", "content": "U"}], **body)
    deltas = []
    parser = codec.parser(prompt, lambda kind, text: deltas.append((kind, text)))
    for token in tokenizer.encode(CALL["text"], add_special_tokens=False).ids:
        parser.push(token)
    assert outcome(parser.finish()) == wanted(CALL["result"])
    streamed = {kind: "".join(text for k, text in deltas if k == kind) for kind, _ in deltas}
    assert streamed == {"reasoning_content": "reason", "content": "text"}


def test_tool_calls_survive_the_round_trip_through_a_prompt(codec):
    """What the encoder renders for past calls, the parser reads back as the same calls (values of every JSON type)."""
    values = {"s": "3", "t": 'a "b" <c>\n2 <', "n": 3, "x": 1.5, "b": True, "z": None, "l": [1, "é"], "d": {"k": []}}
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate([("get_weather", values), ("get_weather", {"location": "東京"})])
    ]  # a string "3" turned into a number, text cut at `<`
    tools = PROMPTS["tools_think"]["body"]["tools"]
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "one"},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
    ]
    text = codec.encode(messages, tools=tools).text
    completion = text.split("<｜Assistant｜>")[1].split("<｜end▁of▁sentence｜>")[0]
    reply = codec.parse(completion.removeprefix("<think>"), thinking=True, tools=True)
    assert [(name, json.loads(arguments)) for name, arguments in reply.tool_calls] == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    assert (reply.reasoning, reply.finish_reason) == ("R", "tool_calls")


def test_a_malformed_call_is_never_an_executable_call_with_empty_arguments(codec):  # lost markers leave {} to execute
    good = CALL["text"]
    for bad in (
        good.replace(' string="true"', ""),
        good.replace("<｜DSML｜ parameter", "<parameter"),
        good.replace("｜ calls>", "｜ function_calls>"),
    ):
        for _, arguments in codec.parse(bad, thinking=True, tools=True).tool_calls:
            assert arguments != "{}"


def test_image_parts_become_one_placeholder_each_and_their_pixels_come_along(codec):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    content = [
        {"type": "image", "image": pixels},
        {"type": "text", "text": "and"},
        {"type": "image", "image": file.getvalue()},
    ]
    prompt = codec.encode([{"role": "user", "content": content}], thinking=False)
    assert prompt.ids.count(Config.flash().image_token_id) == len(prompt.images) == 2
    for data in prompt.images:
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


def test_placeholder_typed_by_a_user_is_no_image(codec):  # user text taken for structure
    prompt = codec.encode([{"role": "user", "content": "a<｜deepseek_image｜>b"}], thinking=False)
    assert Config.flash().image_token_id not in prompt.ids
    assert prompt.images == []


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "nobody", "content": "a"}],
        [{"role": "user"}],
        "text",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://host/x.png"}}]}],
        [{"role": "user", "content": [{"type": "image", "image": "/no/such/file.png"}]}],
        [{"role": "user", "content": [{"type": "image", "image": b"not an image"}]}],
    ],
    ids=itertools.count(),
)
def test_bad_conversations_raise_one_line(codec, messages):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        codec.encode(messages)


def test_unknown_effort_raises_one_line(codec):
    with pytest.raises(ChatError, match=r"^messages: [^\n]*extreme"):
        codec.encode([{"role": "user", "content": "U"}], reasoning_effort="extreme")


def test_tokenizer_without_markers_raises_and_names_them(tokenizer):
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "<think>"]
    with pytest.raises(ChatError, match="<think>"):
        Codec(type(tokenizer).from_str(json.dumps(document)))


def test_released_tokenizer_gives_the_released_engram_map(tokenizer):  # all marks, not only Mn
    ids = compressed_ids(tokenizer, Config.flash())
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert ids.max() + 1 == 99092
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert [int(ids[i]) for i in (0, 1, 2, 3, 128799, 128803, 128804, 128821, 128825, 129264, 129279)] == [
        0, 1, 2, 3, 98611, 98615, 98616, 98633, 98637, 99076, 99091,
    ]  # fmt: skip


def test_released_tokenizer_encodes_the_published_probe(tokenizer):
    probe = "Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ"
    assert tokenizer.encode(probe, add_special_tokens=False).ids == [
        19923, 3, 223, 5464, 5008, 1175, 19, 940, 223, 19, 438, 223, 20, 6113, 257, 76589, 131, 100, 76032, 1628, 76589,
        131, 108, 76589, 131, 98,
    ]  # fmt: skip


def test_tiny_model_chats_and_streams_what_it_replies(tiny):
    deltas = []
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "image", "image": np.zeros((20, 30, 3), np.uint8)}],
        }
    ]
    reply = tiny.chat(
        messages, 6, thinking=False, temperature=0, on_delta=lambda kind, text: deltas.append((kind, text))
    )
    assert reply.finish_reason in ("length", "stop")
    assert "".join(text for kind, text in deltas if kind == "content") == reply.content
    assert len(reply.ids) <= 6
