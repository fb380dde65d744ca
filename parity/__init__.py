"""Comparison of this library's outputs with those of other implementations; the only package that may import one."""
