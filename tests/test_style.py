"""The house rules that a machine can check: which way imports point, file and function lengths, names, no skips."""

import ast
import sys

import pytest
from conftest import ROOT

PACKAGES = ("pallas_kernels", "dsv41_jax", "parity")
ORDER = (
    "atomic config sharding quant linear norm rope cache compressor indexer attention moe engram block vision "
    "dspark model replay verify schedule checkpoint loading snapshot inventory orbax_checkpoint saving convert "
    "generate programs steps speculate encoding pretrained context __init__ cli __main__"
).split()
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path):
    """(module, names) of the imports that run when a file is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checked = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for n in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in checked:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_stands_below_them(path):
    package = path.relative_to(ROOT).parts[0]
    for module, _ in imports(path):
        target = module.split(".")[0]
        if target in PACKAGES:
            assert PACKAGES.index(target) <= PACKAGES.index(package), module
        if package == "pallas_kernels":
            assert target in {"pallas_kernels", "jax", "numpy", "jaxtyping"} | sys.stdlib_module_names, module
        if package != "parity":
            assert target not in {"torch", "transformers", "vllm", "nemo_automodel"}, module


@pytest.mark.parametrize("path", sorted((ROOT / "dsv41_jax").glob("*.py")), ids=lambda path: path.stem)
def test_model_files_import_only_what_stands_earlier_in_the_dataflow(path):
    assert path.stem in ORDER
    for module, names in imports(path):
        if module == "dsv41_jax":
            stems = [name for name in names if name in ORDER] or ["__init__"]
        elif module.startswith("dsv41_jax."):
            stems = [module.split(".")[1]]
        else:
            continue
        for stem in stems:
            assert ORDER.index(stem) < ORDER.index(path.stem), f"{path.stem} imports {stem}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short_and_documented(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


def test_no_file_is_a_drawer():
    assert not {path.stem for path in FILES} & {"utils", "common", "helpers", "misc", "base"}


def test_no_test_is_skipped_or_expected_to_fail():
    marks = ("pytest." + "skip", "mark." + "skip", "x" + "fail")
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [mark for mark in marks if mark in text], path.name
