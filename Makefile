VENV := .venv
BIN := $(VENV)/bin
AOT := .venv-aot

.PHONY: demo test lint parity kernels-aot clean

demo: $(VENV)/installed  ## layer plan, parity and a generation from the bundled checkpoint
	$(BIN)/dsv41 demo

DOCTESTS := $(addprefix dsv41_jax/, model.py config.py files/safetensors.py engine/schedule.py)

test: $(VENV)/installed  ## the default suite and the doctests
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 10 --doctest-modules $(DOCTESTS) tests

parity: $(VENV)/installed  ## every golden vector that the repository holds
	$(BIN)/python -m parity golden dsv41_jax/data/tiny tests/golden/text-min tests/golden/units

lint: $(VENV)/installed  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

kernels-aot: $(AOT)/installed  ## every kernel and tile to machine code for sm_90a and sm_103a, without a GPU
	$(AOT)/bin/python -m pallas_kernels.aot

$(VENV)/installed: pyproject.toml constraints.txt
	python=$$(.ci/python) && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# JAX's CUDA plugin and the compilers alone (--no-deps, 1.6 GB in all): no driver, cuDNN or NCCL is needed.
$(AOT)/installed: Makefile
	python=$$(.ci/python) && "$$python" -m venv --clear $(AOT)
	$(AOT)/bin/python -m pip install --quiet --disable-pip-version-check jax==0.11.2 jaxlib==0.11.2 jaxtyping==0.3.11
	$(AOT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 \
		nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-nvjitlink==13.0.88 nvidia-cuda-nvrtc==13.0.88 \
		nvidia-cuda-cupti==13.0.85 nvidia-cuda-runtime==13.0.96
	touch $@

clean:
	rm -rf $(VENV) $(AOT) build dist *.egg-info
