# make lab      the environment, your copies of the lessons, JupyterLab
# make book     the worked lessons as a site to read, in build/book
# make test     the environment, and everything that CI runs
# make venv     the environment alone, in .venv (also inside an active conda or virtual environment)
# Variables: PYTHON (what .venv is made from), LESSON, PORT, NO_BROWSER, WORK, OUT, COMMIT; RUN is a Python to use
# in place of .venv, on a host that has the packages: make test-gpu RUN=python3

PYTHON ?= python3
HOST_PYTHON ?= 3.12
RUN ?=
STAMP := .venv/.installed
PY := $(or $(RUN),.venv/bin/python)
COURSE := $(PY) -m course_lib.authoring.cli
ENV := $(if $(RUN),,$(STAMP))
# Kernels start in the notebook's folder: there, an uninstalled project is found by its path alone.
export PYTHONPATH := $(if $(RUN),$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)),$(PYTHONPATH))

# An environment holds absolute paths, so one that was moved is installed again.
ifneq ("$(shell cat $(STAMP) 2>/dev/null)","$(CURDIR)")
$(STAMP): moved
endif

.PHONY: lab test lessons book record venv wheelhouse test-gpu lint clean moved
.DEFAULT_GOAL := lab

lab: $(ENV)
	@$(COURSE) lab $(LESSON) $(if $(WORK),--work "$(WORK)") $(if $(PORT),--port $(PORT))

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m "not gpu" -p course_lib.authoring.plugin \
	    --nbval-lax --nbval-current-env --nbval-cell-timeout=300 tests nbs

lint: $(ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(COURSE) build --check

lessons: $(ENV)
	$(COURSE) build

book: $(ENV)
	@$(COURSE) book $(if $(OUT),--out "$(OUT)")

record: $(ENV)
	$(COURSE) record $(LESSON) $(if $(COMMIT),--commit $(COMMIT))

test-gpu: $(ENV)
	$(PY) -m pytest -m gpu tests

# Wheels for a GPU host without a network; wheels.txt says how it installs them.
wheelhouse: $(ENV)
	$(PY) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(HOST_PYTHON) \
	    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	    --dest .whl --requirement course_lib/authoring/wheels.txt

venv: $(STAMP)

# Written last: an installation that failed or was interrupted leaves no stamp, and is taken up again.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The course needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another, as in make PYTHON=python3.12" % sys.version_info[:2])'
	@rm -f $(STAMP)
	.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	@printf '%s' "$(CURDIR)" > $(STAMP)

clean:
	rm -rf .venv .whl build .pytest_cache .ruff_cache
