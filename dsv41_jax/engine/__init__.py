"""The host: what is compiled, and on which tokens it runs."""
