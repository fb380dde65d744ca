"""The house rules that a machine can check: which way imports point, file and function lengths, names, no skips."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

PACKAGES = ("pallas_kernels", "dsv41_jax", "parity")
# Four words place a file of dsv41_jax, beside the ground: below what it may import, behind what it builds on.
ORDER = (
    "untrusted config_rules config numerics sharding atomic ablation "
    "nn.linear nn.norm nn.rope nn.cache nn.compressor nn.indexer nn.attention nn.moe nn.engram nn.block nn.vision "
    "nn.dspark nn.transformer nn.replay nn.random nn.__init__ "
    "engine.ngrams engine.tables engine.images engine.snapshot engine.sampling engine.verify engine.schedule "
    "engine.programs engine.chunks engine.engine engine.decode engine.chat engine.__init__ "
    "files.arrays files.directory files.expected files.inventory files.load files.safetensors files.snapshot "
    "files.orbax files.orbax_writer files.checkpoint files.convert files.__init__ model __init__ measure "
    "cli.terminal cli.__init__ cli.options cli.show cli.run cli.chat cli.measure __main__"
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


def module_of(path):
    return ".".join(path.relative_to(ROOT / "dsv41_jax").with_suffix("").parts)


MODEL_FILES = [path for path in FILES if "dsv41_jax" in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("path", MODEL_FILES, ids=module_of)
def test_model_files_import_only_what_stands_earlier_in_the_dataflow(path):
    mine = module_of(path)
    assert mine in ORDER
    for module, names in imports(path):
        target, _, inside = module.partition(".")
        if target == "dsv41_jax":
            for name in names:
                found = next(one for one in (f"{inside}.{name}".lstrip("."), inside, "__init__") if one in ORDER)
                assert ORDER.index(found) < ORDER.index(mine), f"{mine} imports {found}"
        elif mine.startswith("nn."):
            allowed = {"pallas_kernels", "jax", "flax", "numpy", "einops", "jaxtyping"} | sys.stdlib_module_names
            assert target in allowed, f"{mine} imports {module}"


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


KNOWN_AS = {"np", "jnp", "pl", "plgpu", "plt", "mgpu", "P", "ocp", "recipe"}  # how everybody writes them


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_right_where_they_are_made_and_long_records_are_written_by_keyword(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            renamed = {alias.asname for alias in node.names if alias.asname is not None}
            assert renamed <= KNOWN_AS, f"line {node.lineno}: renamed at import"
        if isinstance(node, ast.ClassDef):
            made = [ast.unparse(decorator) for decorator in node.decorator_list]
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one)]
            if len(fields) > 4 and any(one.startswith("dataclass") for one in made):
                assert any("kw_only=True" in one for one in made), f"{node.name} has {len(fields)} fields"
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1][:1].isupper():  # records, not reshapes
            numbers = [one for one in node.args if isinstance(one, ast.Constant) and type(one.value) in (int, float)]
            assert len(numbers) <= 4, f"line {node.lineno}: {len(numbers)} bare numbers in a row"


def test_importing_the_library_loads_no_pillow_tokenizers_or_orbax():
    heavy = ["PIL", "tokenizers", "orbax", "orbax.checkpoint", "huggingface_hub", "click"]
    code = f"import dsv41_jax, sys; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_every_dependency_is_imported_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[\w-]+", line)[0].replace("-", "_").lower() for line in project["dependencies"]}
    named = {"pillow": "pil", "orbax_checkpoint": "orbax", "jaxlib": "jax"}
    found = {name.split(".")[0].lower() for path in FILES for name, _ in imports(path)}
    text = " ".join(path.read_text() for path in FILES)
    for name in wanted:
        module = named.get(name, name)
        assert module in found or f'"{module}"' in text, f"{name} is required and imported nowhere"
