"""What the kernels' target, benchmark and ahead-of-time compiler do around the kernels, on a machine without a GPU."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import BackendError, aot, target
from pallas_kernels.bench.__main__ import main, others
from pallas_kernels.bench.check import check, poison
from pallas_kernels.bench.clock import L2_BYTES, Clock, calls_of, chain, floor_us, nbytes, rotating
from pallas_kernels.bench.dump import command_buffers
from pallas_kernels.bench.peers import time_peers
from pallas_kernels.bench.table import line
from pallas_kernels.case import Case, selected
from pallas_kernels.mhc import cases

TILES = {"sm_90": "H200", "sm_103": "B300"}


def on(kind: str):
    """The target that compiling for a GPU of this kind sees."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 132, "gpu")))


@pytest.mark.parametrize(
    ("kind", "name", "tile"), [("NVIDIA H200", "sm_90", "H200"), ("NVIDIA B300 SXM6 AC", "sm_103", "B300")]
)
def test_the_abstract_device_decides_target_and_tile(kind, name, tile):
    with on(kind):
        assert target.target() == name
        assert target.choose_tile(TILES) == tile
        assert target.use_kernel("topk", "pallas") is True


def test_without_a_gpu_the_first_tile_serves_interpret_mode():
    assert target.target() is None
    assert target.choose_tile(TILES) == "H200"


def test_xla_is_always_allowed():
    assert target.use_kernel("topk", "xla") is False
    with on("NVIDIA A100"):
        assert target.use_kernel("topk", "xla") is False


@pytest.mark.parametrize(
    ("kind", "words"),
    [(None, "topk needs a GPU, the default device is cpu"), ("NVIDIA A100-SXM4", "topk has tiles for sm_103, sm_90")],
)
def test_a_device_that_cannot_run_the_kernel_is_refused_in_one_line(kind, words):
    with on(kind) if kind else use_abstract_mesh(AbstractMesh((), ())), pytest.raises(BackendError, match=words) as e:
        target.use_kernel("topk", "pallas")
    assert "\n" not in str(e.value)


def test_a_gpu_without_a_tile_and_a_jax_without_the_backend_are_refused(monkeypatch):
    with on("NVIDIA H200"):
        with pytest.raises(BackendError, match="no tile for NVIDIA H200; there are sm_103"):
            target.choose_tile({"sm_103": 1})
        monkeypatch.setitem(target.LOWERINGS, "triton", "jax.experimental.pallas.absent")
        with pytest.raises(BackendError, match=r"topk needs jax\.experimental\.pallas\.absent"):
            target.use_kernel("topk", "pallas")


def draw(seed: int) -> tuple[jax.Array, jax.Array]:
    a, b = jax.random.split(jax.random.key(seed))
    return jax.random.normal(a, (4, 8)), jax.random.normal(b, (8,))


def wrong_rows(inputs, output) -> list[str]:
    expected = np.asarray(inputs[0], np.float64) * 2
    return [f"row {i}" for i in range(4) if not np.allclose(output[i], expected[i])]


def double(x, _):
    return x + x


DOUBLE = Case(
    name="double", inputs=draw, kernel=double, reference=double, problems=wrong_rows, flops=32.0, nbytes=256.0
)
RATES = {"copy_tb_s": 4.0, "matmul_tflop_s": 800.0}


def test_a_chain_makes_every_call_on_the_next_inputs():
    sets = [draw(0), draw(1), draw(2)]
    program = jax.jit(chain(double, 5)).lower(sets)
    assert program.as_text().count("call @") == 5
    empty, *outputs = jax.jit(chain(double, 5))(sets)
    assert empty == ()
    for i, out in enumerate(outputs):
        np.testing.assert_array_equal(out, 2 * np.asarray(sets[i % 3][0]))


def test_a_check_finds_wrong_rows_and_runs_that_differ():
    inputs = draw(3)
    assert check(DOUBLE, inputs, repeats=2) == {"problems": [], "repeats_identical": True}
    broken = replace(DOUBLE, kernel=lambda x, _: (x + x).at[2].set(0))
    assert check(broken, inputs, repeats=1)["problems"] == ["row 2"]
    count = iter(range(9))

    def drifting(x, _):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(lambda: np.float32(next(count)), shape)

    assert check(replace(DOUBLE, kernel=drifting), inputs, repeats=1)["repeats_identical"] is False
    assert check(replace(DOUBLE, repeatable=False), inputs) == {"problems": [], "repeats_identical": None}


def test_poison_is_nan_or_all_ones():
    for dtype, bits in ((jnp.float32, None), (jnp.bfloat16, None), (jnp.int32, -1), (jnp.uint8, 255)):
        value = np.asarray(poison(jax.ShapeDtypeStruct((3,), dtype)).astype(jnp.float32))
        assert np.isnan(value).all() if bits is None else (value == bits).all()


def test_inputs_rotate_past_the_cache_but_not_past_the_calls():
    assert len(rotating(draw(0), 8)) == 8  # tiny: as many copies as calls
    large = (jax.ShapeDtypeStruct((100 << 20,), jnp.uint8),)
    assert nbytes(large) == 100 << 20
    assert -(-L2_BYTES // nbytes(large)) == 2


@pytest.mark.parametrize(("microseconds", "programs"), [(3, 24), (40000, 2)])
def test_the_clock_divides_the_difference_of_two_queues_by_the_calls(microseconds, programs, monkeypatch):
    longest = []

    def queue(_, program, times):
        longest.append(times)
        return 12e-3 + times * 5 * microseconds * 1e-6  # a copy, then programs of five calls

    monkeypatch.setattr(Clock, "queue", queue)
    clock = Clock.__new__(Clock)
    clock.repeats = 3
    timed = clock(lambda: None, 5)
    assert timed["us"] == pytest.approx(microseconds)
    assert timed["spread"] == pytest.approx(0, abs=1e-6)
    assert max(longest[3:]) == 2 + programs


def test_the_floor_is_the_larger_of_bytes_and_operations():
    assert floor_us(replace(DOUBLE, nbytes=4e6, flops=0.0), RATES) == pytest.approx(1)
    assert floor_us(replace(DOUBLE, nbytes=4e6, flops=1.6e9), RATES) == pytest.approx(2)
    assert calls_of(DOUBLE, RATES) == 32
    assert calls_of(replace(DOUBLE, nbytes=4e9), RATES) == 5


THUNKS = """000: kCommandBuffer [source | next=003]
    001: kCustomKernel [source | sink] site_small grid: [10, 1, 1] threads: [128, 1, 1]  shared_memory: 4096 bytes
    002: kCustomKernel [source | sink] site_small grid: [10, 1, 1] threads: [128, 1, 1]  shared_memory: 8192 bytes
003: kCustomCall [prev=000 | sink] kCustomCall
"""


def test_launches_are_counted_inside_and_outside_command_buffers(tmp_path):
    (tmp_path / "m.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    (tmp_path / "m.thunk_sequence.txt").write_text("001: kCustomKernel [source | sink] site_small\n")
    assert command_buffers(tmp_path) == {"inside": 2, "outside": 1}


def test_a_peer_is_found_by_the_name_of_the_op(tmp_path):
    (tmp_path / "twice.py").write_text(
        "def peers(case, inputs):\n"
        "    return {'slow': lambda n: sum(range(20000 * n))} if case.name == 'double' else {}\n"
    )
    clock = Clock.__new__(Clock)
    clock.repeats = 3
    timed = time_peers([tmp_path], "twice", DOUBLE, draw(0), clock, 4)
    assert timed["slow"]["us"] > 0
    assert time_peers([tmp_path], "other", DOUBLE, draw(0), clock, 4) == {}


def result(**changes: object) -> dict:
    return {
        "op": "mhc", "case": "site", "flops": 0.0, "nbytes": 4e6, "problems": [], "repeats_identical": True,
        "ceilings": RATES, "floor_us": 1.0, "kernel": {"us": 1.25, "spread": 0.01},
        "no_graphs": {"us": 3.0, "spread": 0.1}, "reference": {"us": 5.0, "spread": 0.0},
        "command_buffers": {"inside": 32, "outside": 0},
        "peers": {"torch.compile": {"us": 2.5, "spread": 0.0}, "absent": {"error": "no library"}},
    } | changes  # fmt: skip


def test_the_table_is_made_from_the_file_alone(tmp_path, capsys):
    failed = {"op": "topk", "case": "long", "flops": 0.0, "nbytes": 1.0, "problems": ["row 3 differs"]}
    report = {"device": "H200", "jax": "0", "date": "2026-11-29", "results": [result(), failed]}
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert main(["--table", str(tmp_path / "r.json")]) == 0
    head, *_, row, last = capsys.readouterr().out.strip().splitlines()
    assert head == "H200, JAX 0, 2026-11-29; copy 4.00 TB/s, bf16 matmul 800 TFLOP/s."
    against = "reference 4.00 x, torch.compile 2.00 x"
    assert row == f"| mhc | site | 1.2 us | 3.20 TB/s | 1.25 x | {against} | yes; 3.0 us without | ok |"
    assert last.endswith("| row 3 differs |")


def test_a_word_that_names_no_case_is_refused():
    with pytest.raises(SystemExit, match="'hmc' is not one of"):
        list(selected(["hmc"]))


def test_small_cases_are_the_ones_that_the_tests_run():
    assert [case.name for _, case in selected(["mhc"], "SMALL")] == [case.name for case in cases.SMALL]


def test_a_second_run_keeps_the_other_cases_of_the_same_day_only(tmp_path):
    here = {"device": "H200", "jax": "0", "date": "2026-11-29"}
    left = [result(), result(case="other")]
    (tmp_path / "r.json").write_text(json.dumps(here | {"results": left}))
    again = [("mhc", replace(DOUBLE, name="site"))]
    assert [kept["case"] for kept in others(tmp_path / "r.json", here, again)] == ["other"]
    assert others(tmp_path / "r.json", here | {"date": "2026-11-30"}, again) == []
    assert others(tmp_path / "absent.json", here, again) == []


def test_the_console_line_says_what_is_wrong():
    assert line(result(problems=["row 1: 3"], repeats_identical=False)).endswith("row 1: 3, repeated runs differ")


PTXAS = """ptxas info    : Compiling entry function 'site' for 'sm_90a'
ptxas info    : Function properties for site
    40 bytes stack frame, 36 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas warning : Registers are spilled to local memory in function 'late', 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'fusion' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers
Resources(smem_scratch_bytes=65536, tmem_scratch_cols=0)
"""


def test_the_compilers_report_is_read_kernel_by_kernel():
    assert aot.ptxas_report(PTXAS) == {
        "site": {"registers": 168, "spill": 36},
        "fusion": {"registers": 16, "spill": 0},
    }
    assert aot.shared_memory(THUNKS, PTXAS) == {"site_small": 8192, "": 65536}


def test_spills_and_shared_memory_past_the_limit_fail():
    kernels = {"site": {"registers": 255, "spill": 100, "shared": 240000}}
    assert aot.failures({"kernels": kernels}, 100) == ["site: shared 240000 bytes, the limit is 232448"]
    assert aot.failures({"kernels": kernels}, 99)[0] == "site: spill 100 bytes, the limit is 99"
    assert aot.failures({"error": "XlaRuntimeError: too large"}, 0) == ["XlaRuntimeError: too large"]


@pytest.mark.parametrize("status", [0, 3])
def test_a_compiling_process_that_dies_fails_the_run(status, monkeypatch, capsys):
    record = {"op": "mhc", "case": "site", "target": "sm_90", "kernels": {}, "graph": True}
    child = SimpleNamespace(stdout=iter([json.dumps(record)]), wait=lambda: status, returncode=status)
    monkeypatch.setattr(aot.subprocess, "Popen", lambda *_, **__: child)
    assert aot.main(["--target", "sm_90"]) == int(status != 0)
    assert ("status 3" in capsys.readouterr().out) == (status == 3)
