"""Files of arrays appear whole or not at all, and hold what NumPy can."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.files.arrays import to_host, write_npz


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    path.write_bytes(b"old")

    def half(stream, **_):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(OSError, match="disk full"):
        write_npz(path, {"a": np.zeros(1)})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_bfloat16_comes_to_the_host_as_the_same_numbers():
    value = to_host(jnp.asarray([1.5, -3.0], jnp.bfloat16))
    assert (value.dtype, value.tolist()) == (np.float32, [1.5, -3.0])
    assert to_host(jnp.asarray([3, 4], jnp.int32)).dtype == np.int32
