VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint parity clean

demo: $(VENV)/installed  ## layer plan, parity and a generation from the bundled checkpoint
	$(BIN)/dsv41 demo

DOCTESTS := $(addprefix dsv41_jax/, pretrained.py config.py checkpoint.py schedule.py)

test: $(VENV)/installed  ## the default suite and the doctests
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 10 --doctest-modules $(DOCTESTS) tests

parity: $(VENV)/installed  ## every golden vector that the repository holds
	$(BIN)/python -m parity golden dsv41_jax/data/tiny tests/golden/text-min tests/golden/units

lint: $(VENV)/installed  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	python=$$(.ci/python) && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
