"""The operations that need a kernel on a GPU, one folder each: public function, plain reference, named shapes.

A leaf package: it imports jax, numpy and jaxtyping only. What has a kernel takes `backend=`: "xla" runs the reference
under XLA; "pallas" runs the kernel, and raises where it cannot. Nothing falls back silently.
"""


class BackendError(NotImplementedError):
    """The asked backend cannot run an operation here; the message says which and why."""
