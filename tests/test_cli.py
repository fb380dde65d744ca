"""The command line: what it prints, where errors go, and that files appear whole or not at all."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from dsv41_jax import Config, cli
from dsv41_jax.cli import show, terminal

TINY = ROOT / "dsv41_jax/data/tiny"


def run(*arguments):
    """Exit status of a command in this process."""
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        return stop.code
    return 0


def error_line(capsys):
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines, captured
    return lines[-1]


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, tokens=np.array([[0, 3, 40, 41], [0, 9, 10, 11]]))
    return path


def test_info_prints_the_plan_and_the_counts_of_the_headers(capsys):
    assert run("info", "tiny") == 0
    out = capsys.readouterr().out
    assert "reindex" in out
    assert "705" in out
    assert f"{2346349:,}" in out
    assert f"{(434 + 606) * 32:,}" in out


def test_info_counts_the_bytes_of_each_device_of_a_mesh_that_is_not_there(capsys):
    assert run("info", "tiny", "--mesh", "data=9,expert=2") == 0
    rows = dict(re.findall(r"^(\S.*?) {2,}([\d,]+)", capsys.readouterr().out.split("On each of 18 devices")[1], re.M))
    experts = 8 * 6 * 3 * 96 * 32 // 2 * 17 // 16  # layers, experts, matrices; two in a byte and a scale for 32
    assert rows["routed experts"] == f"{experts // 2:,}"
    assert rows["engram tables, 'sharded'"] == f"{(25 + 34) * 33:,}"  # 434 and 606 rows, over 18 and rounded up
    assert (rows["engram tables, 'mmap'"], rows["engram tables, 'device'"]) == ("0", f"{(434 + 606) * 33:,}")


def test_info_of_the_released_config_needs_no_files(monkeypatch, capsys):
    monkeypatch.setattr(Config, "flash", Config.tiny)  # which is small; the released counts stand in test_inventory
    monkeypatch.setattr(show, "open_checkpoint", lambda *_, **__: pytest.fail("a checkpoint was opened"))
    assert run("info", "flash") == 0
    assert f"{2346349:,}" in capsys.readouterr().out


def test_info_needs_no_data_behind_the_headers(tmp_path, capsys):
    shutil.copy(TINY / "config.json", tmp_path)
    raw = (TINY / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
    assert run("info", str(tmp_path)) == 0
    assert f"{2346349:,}" in capsys.readouterr().out
    assert run("verify", str(tmp_path)) == 1  # which does need them
    assert "705 deviations" in capsys.readouterr().out


def test_logits_file_holds_the_models_logits_and_taps(tokens, tmp_path, tiny):
    out = tmp_path / "out.npz"
    taps = "layers.3.index_topk,layers.0.out"
    assert (
        run("logits", "tiny", "--tokens", str(tokens), "--out", str(out), "--numerics", "float32", "--taps", taps) == 0
    )
    found = np.load(out)
    assert set(found) == {"logits", "layers.3.index_topk", "layers.0.out"}
    np.testing.assert_array_equal(found["logits"], tiny(np.load(tokens)["tokens"]).logits)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".npz"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["info", "/no/such/dir"], "/no/such/dir"),
        (["info", "tiny", "--colour"], "--colour"),
        (["info", "tiny", "--mesh", "expert=5"], "axis 'experts' of 6 does not divide over mesh axis 'expert' of 5"),
        (["info", "tiny", "--mesh", "expert"], "mesh: 'expert' is not NAME=SIZE"),
        (["info", "tiny", "--mesh", "tensor=2"], "mesh: axis 'tensor' is not one of"),
        (["info", "flash", "--mesh", "data=99999999999999999999"], "is of more than 1,048,576 devices"),
        (["info", "flash", "--mesh", "data=1048576,expert=1048576"], "is of more than 1,048,576 devices"),
        (["info", "hf://nonsense"], "is not of the form hf://owner/name"),
        (["generate", "tiny"], "--prompt"),
        (["generate", "tiny", "--prompt", "a", "--max-new-tokens", "many"], "many"),
        (["generate", "tiny", "--prompt", "a", "--numerics", "float16"], "float16"),
        (["generate", "tiny", "--prompt", "a", "--backend", "pallas"], "needs a GPU, the default device is cpu"),
        (["generate", "tiny", "--prompt", "\udcff\udcfe"], r"prompt: '\udcff\udcfe' is not UTF-8"),
        (["generate", "tiny", "--prompt", "\ud800"], r"prompt: '\ud800' is not UTF-8"),
        (["chat", "tiny", "--message", "\udcff"], r"message: '\udcff' is not UTF-8"),
        (["chat", "tiny", "--message", "a", "--system", "\udcff"], r"system: '\udcff' is not UTF-8"),
        (["generate", "tiny", "--prompt", "a", "--seed", str(1 << 32)], "4294967296 is not in the range"),
        (["chat", "tiny", "--message", "a", "--seed", "-1"], "-1 is not in the range"),
        (["context", "tiny", "--tokens", "16,99999999999"], "tokens: 99999999999 is more than 2147483647"),
        (["generate", "tiny", "--prompt", "a", "--top-p", "0"], "top_p: 0.0"),
        (["generate", "tiny", "--prompt", "a", "--temperature", "-1"], "temperature: -1.0"),
        (["generate", "tiny", "--prompt", "a", "--max-new-tokens", "100000"], "max_position_embeddings 128"),
        (["generate", "tiny", "--prompt", "a", "--draft", "--cost", "/no/such.json"], "/no/such.json"),
        (["logits", "tiny", "--tokens", "/no/such.npz", "--out", "x.npz"], "/no/such.npz"),
        (["logits", "tiny", "--tokens", "TOKENS", "--out", "/no/such/dir/x.npz"], "/no/such/dir/x.npz"),
        (["chat", "tiny", "--message", "hi", "--image", "/no/such.png"], "/no/such.png"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(arguments, said, capsys, tokens):
    assert run(*[str(tokens) if a == "TOKENS" else a for a in arguments]) == 2
    line = error_line(capsys)
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize("kind", [MemoryError, OverflowError, RuntimeError, TypeError, KeyError])
def test_what_no_check_foresaw_is_one_line_too(kind, monkeypatch, capsys):
    def fails(*_, **__):
        raise kind("of\nthis kind \x1b]0;title\x07")

    monkeypatch.setattr(show, "open_checkpoint", fails)
    assert run("info", "tiny") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {kind.__name__}: ")
    assert "\x1b" not in line and "\x07" not in line


@pytest.mark.parametrize("where", ["import_module", "open_checkpoint"])
def test_an_interrupt_is_one_line_and_status_130(where, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(show if where == "open_checkpoint" else cli.importlib, where, interrupted)
    assert run("info", "tiny") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_the_first_line_on_a_stderr_that_is_no_terminal_is_the_error(capsys):
    assert run("generate", "tiny", "--prompt", "a", "--max-new-tokens", "100000") == 2  # behind a load and a prefill
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_bytes_of_a_prompt_are_utf8_whatever_the_locale():
    assert cli.text_of("prompt", "é") == "é"
    assert cli.text_of("prompt", "é".encode().decode("ascii", "surrogateescape")) == "é"


def test_control_characters_are_shown_and_not_sent():
    every = "".join(map(chr, range(0x180))) + "\ud800\udfff"
    shown = terminal.visible(every)
    assert not [one for one in shown if one not in "\n\t" and (ord(one) < 32 or 127 <= ord(one) < 160)]
    assert shown.encode().decode() == shown
    assert r"\x0e\x0f" in shown and r"\x1b" in shown and r"\x7f\x80" in shown and r"\x9f" in shown
    assert terminal.visible("a\n\tb [é] \\x1b") == "a\n\tb [é] \\x1b"


def test_names_in_files_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "evil", ignore=shutil.ignore_patterns("model.safetensors"))
    index = {"weight_map": {"a\x1b]0;pwned\x07": "model.safetensors", "b\x9b2J": "model.safetensors"}}
    (tmp_path / "evil/model.safetensors.index.json").write_text(json.dumps(index))
    for command, status in (("verify", 1), ("info", 2), ("generate", 2)):
        assert run(command, str(tmp_path / "evil"), *(["--prompt", "a"] if command == "generate" else [])) == status
        captured = capsys.readouterr()
        assert not set(captured.out + captured.err) & set("\x1b\x07\x9b")


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_bad_token_files_are_named(content, tmp_path, capsys):
    path = tmp_path / "in.npz"
    if content is None:
        np.savez(path, ids=np.zeros((1, 2), int))
    else:
        path.write_bytes(content)
    assert run("logits", "tiny", "--tokens", str(path), "--out", str(tmp_path / "out.npz")) == 2
    assert error_line(capsys).startswith("error: ")
    assert not (tmp_path / "out.npz").exists()


def test_bad_cost_table_is_named(tmp_path, capsys):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"tokens": [2], "verify": [], "draft": 1}))
    assert run("generate", "tiny", "--prompt", "a", "--draft", "--cost", str(path)) == 2
    assert str(path) in error_line(capsys)


def test_info_and_verify_read_what_convert_wrote(tmp_path, capsys):
    stored = tmp_path / "stored"
    assert run("info", "tiny", "--mesh", "data=1,expert=2") == 0
    wanted = capsys.readouterr().out
    assert run("convert", "tiny", str(stored)) == 0
    assert error_line(capsys) == f"{stored}: complete"
    assert run("info", str(stored), "--mesh", "data=1,expert=2") == 0
    assert capsys.readouterr().out == wanted
    assert run("verify", str(stored)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{stored}: ") and line.endswith(" tensors, 2,346,349 bytes, 0 deviations")


def test_verify_names_what_is_wrong_with_an_orbax_checkpoint_in_a_line_each(tmp_path, capsys):
    stored = tmp_path / "stored"
    assert run("convert", "tiny", str(stored)) == 0
    largest = max((stored / "orbax/parameters").rglob("*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    capsys.readouterr()
    assert run("verify", str(stored)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{largest.relative_to(stored)}: damaged (SHA-256 differs)"
    assert lines[1].endswith(" 1 deviations") and len(lines) == 2
    assert run("info", str(stored)) == 0  # which reads no weights
    largest.unlink()
    (stored / "orbax/engram/layers.1.engram.embed.scale").unlink()
    capsys.readouterr()
    assert run("verify", str(stored)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines[:2]] == ["missing", "missing"] and len(lines) == 3
    assert run("info", str(stored)) == 2
    assert "missing" in error_line(capsys)


@pytest.mark.parametrize("name", ["model[v1]", "a[/b]", "[bold]x"])
def test_brackets_in_a_path_are_not_markup(name, tmp_path, capsys):
    target = tmp_path / name
    target.parent.mkdir(exist_ok=True)
    assert run("convert", "tiny", str(target)) == 0
    assert error_line(capsys) == f"{target}: complete"
    assert run("verify", str(target)) == 0


def test_the_bundled_name_means_the_bundled_checkpoint_whatever_lies_beside(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny/orbax").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run("info", "tiny") == 0
    capsys.readouterr()
    assert run("info", "./tiny") == 2
    assert "MANIFEST: cannot be read" in error_line(capsys)


def test_listing_the_commands_loads_no_orbax_and_no_parser():
    code = """
import sys, types
model = sys.modules["dsv41_jax.model"] = types.ModuleType("dsv41_jax.model")  # what it needs is its own affair
model.Model = type("Model", (), {})
from dsv41_jax import cli
cli.main(["--help"])
print([name for name in ("orbax", "orbax.checkpoint", "deepseek_recipe", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert re.search(r"^  verify +Check names", done.stdout, re.MULTILINE)


def test_demo_runs_in_a_process_of_its_own_and_streams_a_text():
    done = subprocess.run(
        [sys.executable, "-m", "dsv41_jax", "demo"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("largest absolute difference ")[1].split()[0])
    assert difference <= 1e-4
    assert "tokens/s" in done.stderr
    assert done.stderr.splitlines()[0] and not set(done.stdout + done.stderr) & set("\x0e\x0f\x1b")


@pytest.mark.parametrize("given", ["abc", "12,", "0", "-3", "1.5"])
def test_lengths_that_are_no_numbers_of_tokens_give_one_line(given):
    with pytest.raises(ValueError, match=f"^tokens: '{given}' is not a comma-separated list of numbers of at least 1$"):
        cli.lengths_of(given)
    assert cli.lengths_of("8, 1024") == [8, 1024]


def test_no_table_is_cut_however_narrow_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert run("info", "tiny", "--mesh", "data=2") == 0
    out = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "20")
    assert run("info", "tiny", "--mesh", "data=2") == 0
    narrow = capsys.readouterr().out
    plan = out.split("Parts")[0].splitlines()
    assert max(map(len, plan)) <= 60
    for text in (out, narrow):
        assert "…" not in text
        for word in ("reindex", "publishes", "obeys", "Engram", "candidates", "engram tables, 'sharded'", "34,320 in"):
            assert word in text
