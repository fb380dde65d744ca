"""`dsv41 profile`, `context`: each row is printed as it is known."""

import json

import pytest
from test_cli import run

from dsv41_jax.cli import measure, options
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.measure import ContextCost


@pytest.fixture(autouse=True)
def _loaded_at_once(tiny, monkeypatch):
    monkeypatch.setattr(options.Model, "from_pretrained", lambda *_, **__: tiny)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (MemoryError("none"), 2)])
def test_rows_of_context_are_kept_when_a_later_length_ends_it(error, status, monkeypatch, capsys):
    def cost(model, tokens, decoded, *, on_phase):
        on_phase("prefill")
        if tokens > 64:
            raise error
        return ContextCost(tokens=tokens, prefill=1.5, decode=0.25, cache=2_000_000, peak=3_000_000_000)

    monkeypatch.setattr(measure, "measure_context", cost)
    assert run("context", "tiny", "--tokens", "16,64,1k") == status
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert rows[1] == ["16", "1.5", "93.75", "250.0", "2.00", "MB", "3.00", "GB"]
    assert len(rows) == 3 and rows[2][0] == "64"
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1


def test_rows_of_a_profile_are_kept_and_its_file_is_whole_or_absent(tmp_path, monkeypatch, capsys):
    def costs(model, batch, repeats, on_cost):
        on_cost("drafting", 0.001)
        on_cost("2", 0.0025)
        if batch > 1:
            raise KeyboardInterrupt
        return CostTable((2,), (0.0025,), 0.001)

    monkeypatch.setattr(measure, "measure_costs", costs)
    out = tmp_path / "p.json"
    assert run("profile", "tiny", "--out", str(out), "--batch", "2") == 130
    assert not out.exists()
    assert run("profile", "tiny", "--out", str(out)) == 0
    assert json.loads(out.read_text()) == {"tokens": [2], "verify": [0.0025], "draft": 0.001}
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == 2 * [["tokens", "a", "step", "milliseconds"], ["drafting", "1.00"], ["2", "2.50"]]
