"""`dsv41 generate`, `chat`, `logits`: what is checked before a model is loaded, and a conversation within its room."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cli import error_line, run

from dsv41_jax import Model, cli
from dsv41_jax.cli import chat, options
from dsv41_jax.cli.run import stream_text, tap_names


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test."""
    monkeypatch.setattr(options.Model, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "tiny", "--prompt", "a", "--top-p", "0"], "top_p: 0.0"),
        (["generate", "tiny", "--prompt", "a", "--temperature", "nan"], "temperature: nan"),
        (["generate", "tiny", "--prompt", "a", "--seed", "99999999999999999999"], "is not in the range"),
        (["generate", "tiny", "--prompt", "a", "--cost", "x.json"], "--cost chooses"),
        (["generate", "tiny", "--prompt", "\udcff"], "is not UTF-8"),
        (["generate", "tiny", "--prompt", "@/no/such.txt"], "/no/such.txt"),
        (["generate", "tiny", "--prompt", "a", "--max-new-tokens", "9999M"], "9999M is more than 2147483647"),
        (["generate", "tiny", "--prompt", "a", "--mesh", "expert=512"], "mesh: 'expert=512' takes 512 devices"),
        (["generate", "tiny", "--prompt", "a", "--mesh", "tensor=2"], "mesh: axis 'tensor' is not one of"),
        (["generate", "tiny", "--prompt", "a", "--engram", "sharded"], "engram: 'sharded' splits the tables"),
        (["generate", "tiny", "--prompt", "a", "--compile-cache", "/proc/x"], "/proc/x"),
        (["generate", "flash", "--prompt", "a"], "CKPT: 'flash' is no checkpoint, but a config without weights"),
        (["generate", "", "--prompt", "a"], "CKPT: '' is no checkpoint"),
        (["chat", "tiny", "--message", "a", "--top-p", "2"], "top_p: 2.0"),
        (["chat", "tiny", "--message", "a", "--image", "/no/such.png"], "/no/such.png"),
        (["logits", "tiny", "--out", "x.npz"], "Missing option '--tokens'"),
        (["logits", "tiny", "--tokens", "x.npz"], "Missing option '--out'"),
        (["logits", "tiny", "--tokens", "x.npz", "--out", "/no/such/dir/x.npz"], "its directory does not exist"),
        (["profile", "tiny", "--out", "/no/such/dir/p.json"], "/no/such/dir/p.json: its directory does not exist"),
        (["profile", "tiny", "--out", "/tmp"], "/tmp"),
        (["profile", "tiny", "--out", "p.json", "--batch", "0"], "0 is not in the range"),
        (["context", "tiny", "--tokens", "16,99999999999"], "tokens: 99999999999 is more than 2147483647"),
        (["context", "tiny", "--decode", "0"], "0 is not in the range"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(arguments, said, no_model, capsys):
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch, no_model, capsys):
    monkeypatch.setattr(options.os, "access", lambda *_: False)  # a superuser may write anywhere
    assert run("profile", "tiny", "--out", str(tmp_path / "p.json")) == 2
    assert "its directory is not writable" in error_line(capsys)


@pytest.mark.parametrize(
    ("given", "number"), [("4096", 4096), ("64k", 65536), ("1M", 1048576), ("2K", 2048), (" 3m", 3 << 20)]
)
def test_numbers_of_tokens_may_have_a_unit(given, number):
    assert cli.number_of(given) == number
    assert cli.lengths_of(f"8, {given}") == [8, number]


def test_a_prompt_comes_from_the_line_a_file_or_standard_input(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_bytes("é\n\n".encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"The cafe\n")))
    assert cli.prompt_of("-") == "The cafe"
    assert cli.prompt_of(f"@{tmp_path}/p.txt") == "é\n"
    assert (cli.prompt_of("a@b"), cli.prompt_of("--"), cli.prompt_of("@@me")) == ("a@b", "--", "@me")
    (tmp_path / "p.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 0xff at 2\)$"):
        cli.prompt_of(f"@{tmp_path}/p.txt")


def test_taps_are_listed_without_tokens_and_without_weights(tiny, no_model, capsys):
    assert run("logits", "tiny", "--taps", "list") == 0
    listed = capsys.readouterr().out.split()
    with pytest.raises(ValueError, match="is not one of") as error:
        tiny([[0, 3]], taps=["nonsense"])
    assert listed == re.sub(".*is not one of ", "", str(error.value)).split(", ")
    assert listed == tap_names(tiny.config)


def loaded(model):
    """`Model.from_pretrained` that takes no time; what it was given is kept."""

    def load(path, *, on_progress, **how):
        load.how = how
        return model

    return load


def test_the_options_of_a_model_reach_it(tiny, monkeypatch, capsys):
    load = loaded(tiny)
    monkeypatch.setattr(options.Model, "from_pretrained", load)
    line = "generate tiny --prompt a --max-new-tokens 1 --mesh data=2,expert=2 --engram device --numerics float32"
    assert run(*line.split()) == 0
    assert dict(load.how["mesh"].shape) == {"data": 2, "expert": 2}
    assert (load.how["engram"], load.how["numerics"], load.how["backend"]) == ("device", "float32", "xla")


def test_a_directory_keeps_what_was_compiled(tmp_path, monkeypatch):
    settings = {}
    monkeypatch.setattr(options.jax.config, "update", settings.__setitem__)
    options.keep_compiled(tmp_path / "new/cache")
    assert settings == {"jax_compilation_cache_dir": str(tmp_path / "new/cache")}
    assert (tmp_path / "new/cache").is_dir()


def say(n):
    return [{"role": role, "content": str(i)} for i in range(n) for role in ("user", "assistant")][:-1]


class Talker(Model):
    """A model whose prompt takes 10 tokens a message, in a context of 100."""

    config, codec = SimpleNamespace(max_position_embeddings=100), None

    def __init__(self):
        self.config = SimpleNamespace(max_position_embeddings=100)
        self.codec = SimpleNamespace(encode=lambda m, **_: SimpleNamespace(ids=[0] * 10 * len(m), images=[]))

    def expand_images(self, ids, images):
        return ids


@pytest.fixture
def talker():
    return Talker()


def test_an_answer_takes_the_room_that_is_left(talker, capsys):
    assert chat.within_context(talker, say(1), None) == (say(1), 90)
    assert chat.within_context(talker, say(3), None) == (say(3), 50)
    assert chat.within_context(talker, say(3), 7) == (say(3), 7)
    talker.config.max_position_embeddings = 1 << 20
    assert chat.within_context(talker, say(3), None) == (say(3), 1024)
    assert capsys.readouterr().err == ""


def test_the_oldest_turns_go_and_the_system_message_stays(talker, capsys):
    system = [{"role": "system", "content": "s"}]
    kept, room = chat.within_context(talker, system + say(5), None)
    assert kept == system + say(5)[4:] and room == 40
    assert capsys.readouterr().err == "context full: the oldest 2 turns were dropped\n"
    kept, room = chat.within_context(talker, say(5), 80)
    assert kept == say(5)[8:] and room == 80


def test_a_message_that_does_not_fit_alone_is_refused(talker):
    talker.config.max_position_embeddings = 10
    with pytest.raises(ValueError, match=r"^message: 10 tokens and an answer exceed the 10 positions of this model$"):
        chat.within_context(talker, say(2), None)
    talker.config.max_position_embeddings = 11
    assert chat.within_context(talker, say(2), None) == (say(2)[2:], 1)
    with pytest.raises(ValueError, match=r"^message: 10 tokens and 2 new tokens exceed the 11 positions"):
        chat.within_context(talker, say(1), 2)


def test_chat_works_with_its_defaults_over_several_turns(tiny, monkeypatch, capsys):
    monkeypatch.setattr(options.Model, "from_pretrained", loaded(tiny))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nmore, and more of it\n"))
    assert run("chat", "tiny", "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert "oldest 1 turn was dropped" in captured.err
    assert not set(captured.out + captured.err) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))


TALK = """
import sys
import time
from types import SimpleNamespace
from dsv41_jax.cli import chat, main, options

def reply(messages, max_new_tokens, on_delta, **_):
    on_delta("reasoning_content", "thinking\\x1b]0;t\\x07")
    on_delta("content", "said " + messages[-1]["content"])
    return SimpleNamespace(content="said", tool_calls=[])

encode = lambda messages, **_: SimpleNamespace(ids=[0] * 10 * len(messages), images=[])
model = SimpleNamespace(chat=reply, config=SimpleNamespace(max_position_embeddings=100),
    codec=SimpleNamespace(encode=encode), expand_images=lambda ids, images: ids)
options.Model.from_pretrained = lambda *_, **__: model
main(["chat", "tiny"])
"""


def test_on_a_terminal_there_is_a_prompt_and_a_line_between_reasoning_and_answer():
    ours, theirs = pty.openpty()
    talk = subprocess.Popen([sys.executable, "-c", TALK], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"one\n\ntwo\n\x04")
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert talk.wait(60) == 0, seen
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", seen.decode()).replace("\r", "")
    assert text.count("> ") == 4  # one, an empty line, two, the end
    assert text.count("thinking\\x1b]0;t\\x07\nsaid one\n") == 1
    assert text.count("thinking\\x1b]0;t\\x07\nsaid two\n") == 1
    assert "prefill (the first time compiles)" in text


class Drafting(Model):
    """Says three tokens a step; the second step of 0.01 s compiles, and takes 1 s more."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, prompts, max_new_tokens, *, on_token, on_step, **_):
        on_token(0, 40)
        for step in range(4):
            time.sleep(0.01)
            if step == 1:
                jax.jit(lambda x: x + 1)(jnp.zeros(13))
                time.sleep(1)
            on_step(np.array([4]), np.array([2]))
            for token in (41, 42, 43):
                on_token(0, token)


def test_the_speed_of_drafts_is_that_of_steps_that_compiled_nothing(tiny, capsys):
    stream_text(Drafting(tiny.tokenizer), "a", max_new_tokens=13, draft=True, on_first=lambda: None)
    said = capsys.readouterr().err
    rate = float(re.search(r"13 tokens, ([\d.]+) tokens/s", said)[1])
    assert 30 < rate <= 300  # 3 tokens in 0.01 s, on a busy machine; all steps together are below 13
    assert "2.00 of the drafts accepted a step, 4 steps" in said
