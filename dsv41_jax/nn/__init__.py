"""The model, a part of the paper a file: pure functions of arrays and parameters, no host, no file, no thread."""
