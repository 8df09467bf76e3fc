# make lab      the environment, your copies of the lessons, JupyterLab
# make book     the worked lessons as a site to read, in build/book
# make test     the environment, and everything that CI runs
# make venv     the environment alone, in .venv (also inside an active conda or virtual environment)
# Variables: PYTHON (what .venv is made from), LESSON, PORT, NO_BROWSER, WORK, OUT, COMMIT; RUN is a Python to use
# in place of .venv, on a host that has the packages: make test-gpu RUN=python3
# Without a network (cluster/README.md): make wheelhouse TORCH=cuda here, then make lab WHEELS=.whl there.

PYTHON ?= python3
HOST_PYTHON ?= 3.12
TORCH ?= none
TORCH_INDEX ?=
RUN ?=
STAMP := .venv/.installed
PY := $(or $(RUN),.venv/bin/python)
COURSE := $(PY) -m course_lib.authoring.cli
ENV := $(if $(RUN),,$(STAMP))
# Kernels start in the notebook's folder: there, an uninstalled project is found by its path alone.
export PYTHONPATH := $(if $(RUN),$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)),$(PYTHONPATH))

ifneq ($(WHEELS),)
ifeq ($(wildcard $(WHEELS)/*.whl),)
$(error $(WHEELS) holds no wheels: make wheelhouse TORCH=cuda, where there is a network, fills .whl)
endif
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))
endif

# An environment holds absolute paths, so one that was moved is installed again.
ifneq ("$(shell cat $(STAMP) 2>/dev/null)","$(CURDIR)")
$(STAMP): moved
endif

.PHONY: lab test lessons book record venv wheelhouse test-wheelhouse test-gpu soak lint clean moved
.DEFAULT_GOAL := lab

lab: $(ENV)
	@$(COURSE) lab $(LESSON) $(if $(WORK),--work "$(WORK)") $(if $(PORT),--port $(PORT))

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m "not gpu and not soak" -p course_lib.authoring.plugin \
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

# Twenty runs of lesson scale under torchrun, each with two kills: about 15 minutes.
soak: $(ENV)
	$(PY) -m pytest -m soak -s -o faulthandler_timeout=0 tests/scale

# Wheels into .whl for a Linux host without a network. TORCH says which PyTorch is among them: cuda is PyPI's,
# cpu comes from the index TORCH_INDEX, and none is for a host that has PyTorch, as wheels.txt says. cuda and
# cpu hold everything that `make venv WHEELS=.whl` installs there, with the same Python as here.
wheelhouse: $(ENV)
	@cluster/wheelhouse.sh "$(PY)" "$(TORCH)" "$(TORCH_INDEX)" "$(HOST_PYTHON)"

# A copy of this clone, installed from .whl as on that host, executes a lesson.
test-wheelhouse:
	rm -rf build/offline && mkdir -p build/offline
	git ls-files -z | xargs -0 cp --parents --target-directory build/offline
	PIP_CONFIG_FILE=/dev/null $(MAKE) -C build/offline venv WHEELS=$(CURDIR)/.whl
	build/offline/.venv/bin/course run $(or $(LESSON),schedules)
	rm -rf build/offline

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
