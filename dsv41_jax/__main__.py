"""`python -m dsv41_jax`: the `dsv41` command."""

from dsv41_jax.cli import main

main()
