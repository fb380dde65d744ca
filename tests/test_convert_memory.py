"""Conversion in a process of its own: its memory is that of a part, whatever the checkpoint's size."""

import json
import os
import struct
import subprocess
import sys

from conftest import small_config

from dsv41_jax.files.expected import expected_tensors

MEASURE = """
import json, resource, sys
from dsv41_jax.files import orbax_writer
from dsv41_jax.files.convert import convert_checkpoint
orbax_writer.PART_BYTES = int(sys.argv[3])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert_checkpoint("tiny", sys.argv[2] + ".warm")
before = peak()
convert_checkpoint(sys.argv[1], sys.argv[2])
there = peak()
convert_checkpoint(sys.argv[2], sys.argv[2] + ".back")
print(json.dumps([before, there, peak()]))
"""


def test_memory_is_that_of_a_part_and_not_of_the_checkpoint(tmp_path):
    cfg = small_config(
        n_routed_experts=32, hidden_size=512, moe_intermediate_size=512, engram_num_embeddings=[2_000_000]
    )
    wanted = expected_tensors(cfg)
    header, at = {}, 0
    for name, tensor in wanted.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(cfg.to_dict()))
    with (tmp_path / "source/model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)
    part = 8 << 20  # the largest parameter is smaller
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "orbax"), str(part)]
    # One arena: what the allocator keeps for each of Orbax's threads is not what is looked for.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment)
    before, there, back = json.loads(done.stdout)
    assert at > 12 * part
    assert max(there, back) - before < 6 * part, (there - before, back - before)
