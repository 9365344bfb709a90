# Two commands for a fresh machine, each doing its own set-up: make demo, make test.
# make lock writes constraints.txt again after a change of the dependencies in pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint lock

demo: $(READY)
	$(BIN)/python -m runners.mad --preset demo

# Linters run beside the tests and print after them. Tests start many processes; without bytecode on disk each of them
# would compile the code again.
test: $(READY)
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.log 2>&1 & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist worksteal; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests || lint))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip refuses to check hashes of the project's own folder and of a PyTorch that is chosen by the machine, hence two steps.
$(READY): pyproject.toml constraints.txt torch.txt
	@echo "setting up $(VENV): pip downloads up to 3 GB and prints nothing while it works"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps --require-hashes --requirement constraints.txt
	$(PIP) install --quiet --no-build-isolation --constraint torch.txt --editable '.[dev,pretraining]'
	touch $@

# Versions in constraints.txt stay as they are where they still fit; delete the file first to take the newest.
lock: $(READY)
	$(PIP) install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra pretraining --constraints torch.txt \
		--universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-emit-package torch --no-emit-package triton \
		--custom-compile-command 'make lock' --quiet --output-file constraints.txt
