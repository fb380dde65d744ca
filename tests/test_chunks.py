"""Calls as the host makes them: what a prompt may be, and which line it gets when it is none."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from dsv41_jax.engine.chunks import checked_prompt


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), [np.int64(1), np.uint8(2)], range(1, 3)])
def test_a_prompt_is_any_sequence_of_integers(prompt):
    found = checked_prompt(prompt, 0)
    assert found == [1, 2] and all(type(one) is int for one in found)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "prompts: number 3 is a bytes, neither text nor token ids"),
        (None, "prompts: number 3 is a NoneType, neither text nor token ids"),
        (7, "prompts: number 3 is a int, neither text nor token ids"),
        ({1: 2}, "prompts: number 3 is a dict, neither text nor token ids"),
        ([], "prompts: number 3 is empty"),
        ([0, 3.7], "prompts: number 3 holds 3.7, which is no token id"),
        (np.array([1.0]), r"prompts: number 3 holds np.float64\(1.0\), which is no token id"),
        ([True], "prompts: number 3 holds True, which is no token id"),
        ([[1]], r"prompts: number 3 holds \[1\], which is no token id"),
        (["1"], "prompts: number 3 holds '1', which is no token id"),
    ],
)
def test_what_is_no_prompt_gets_one_line(prompt, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked_prompt(prompt, 3)


def test_wrong_arguments_of_generate_get_one_line_before_anything_runs():
    code = """
from dsv41_jax import Model
model = Model.from_pretrained("tiny", numerics="float32")
assert model.tokenize("The cafe")[0] == 0
wrong = [("\\udcff", {}), ([None], {}), (b"abc", {})]
wrong += [([[1]], {"max_new_tokens": 2.5}), ([[1]], {"seed": 1 << 70}), ([[1]], {"temperature": 1e-46})]
for prompts, options in [*wrong, ([[1]], {"seed": 1.5}), ([], {})]:
    try:
        print(model.generate(prompts, **{"max_new_tokens": 2} | options))
    except ValueError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.splitlines() == [
        "prompts: text holds half of a surrogate pair, which is no character",
        "prompts: number 0 is a NoneType, neither text nor token ids",
        "prompts: number 0 is a int, neither text nor token ids",
        "max_new_tokens: 2.5 is not an integer",
        f"seed: {1 << 70} does not fit in 64 bits",
        "temperature: 1e-46 is no normal float32; 0 is greedy",
        "seed: 1.5 is not an integer",
        "prompts: none given",
    ]


def test_one_text_is_one_prompt(tiny):
    assert tiny.generate("The cafe", 2) == tiny.generate(["The cafe"], 2)
