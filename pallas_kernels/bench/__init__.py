"""The benchmark of the kernels on a GPU; `__main__` says what it does and how it is called."""
