# Two commands do all set-up: `make serve` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PORT   ?=
MODEL  ?=
ARGS   ?=
# On a machine with an NVIDIA driver the GPU's kernels are installed too.
CUDA   := $(if $(wildcard /dev/nvidiactl),-e '.[cuda]')

.PHONY: serve test soak explore schemas check format bench clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make serve   install what is missing, serve the bundled model on http://127.0.0.1:8000 (PORT=, MODEL=, ARGS=)"
	@echo "make test    install what is missing, run all tests"
	@echo "make soak    50 live sessions for 5 minutes: nothing may grow (ARGS=)"
	@echo "make explore the property tests on cases that no run has tried before"
	@echo "make schemas a thousand random schemas against a random model"
	@echo "make screenshots   pictures of every page into build/screenshots, and those of the README into docs/images"
	@echo "make check   ruff, format, mypy --strict"
	@echo "make bench   measure this machine against plain transformers"

# One stamp a set of packages: made again when the project's description, its pins or what is compiled change.
INSTALLED := pyproject.toml setup.py constraints.txt $(wildcard engine/*/*.cpp engine/*/*.h)

$(VENV)/.serve: $(INSTALLED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ui]' $(CUDA)
	touch $@

$(VENV)/.dev: $(INSTALLED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ui]' $(CUDA)
	touch $@ $(VENV)/.serve

serve: $(VENV)/.serve
	exec $(BIN)/beholder serve $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# Three workers for two cores, since many tests wait for servers and browsers; tests/order.py says who gets what when.
# What is compiled is kept, whatever the environment asks for: the tests start hundreds of processes.
test: $(VENV)/.dev chromium
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder $(ARGS)

# The browser of tests/ui, rather the one without a window. Where none can be had those tests skip and say so.
.PHONY: chromium
chromium:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || \
	command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  install="env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends"; \
	  (apt-get -qq update && { $$install chromium-headless-shell || $$install chromium; }) \
	    >/dev/null 2>&1 || echo "chromium could not be installed: the tests of the page will skip"; \
	else echo "no chromium, and no apt or no right to use it: the tests of the page will skip"; fi

soak: $(VENV)/.dev
	$(BIN)/python tests/soak.py $(ARGS)

explore: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile=explore $(ARGS)

schemas: $(VENV)/.dev
	SCHEMAS=1000 $(BIN)/python -m pytest tests/test_random_schemas.py -s $(ARGS)

.PHONY: screenshots
screenshots: $(VENV)/.dev chromium
	$(BIN)/python tests/screenshots.py build/screenshots
	$(BIN)/python tests/screenshots.py --readme

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/beholder bench $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info engine/cpu/*.so engine/speculation/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
