# make run · make test · make setup: each prepares what it needs.
PYTHON ?= python3
CONFIG ?= configs/nano/pipeline.toml
NATIVE := setup.py $(wildcard src/glm5/kernels/cpu/*.cpp src/glm5/kernels/cpu/*.h)

.PHONY: run setup test check sandbox clean

run: setup sandbox
	exec env GLM5_PARENT_PID=$$PPID .venv/bin/glm5 run $(CONFIG)

setup: .venv/.ready

.venv/.ready: scripts/setup pyproject.toml $(NATIVE)
	PYTHON=$(PYTHON) scripts/setup report
	@touch $@

.venv/.test-ready: .venv/.ready
	PYTHON=$(PYTHON) scripts/setup test
	@touch $@

# Only a warning: the run itself refuses to start without isolation, unless its configuration says sandbox = "none".
sandbox:
	-@scripts/sandbox

test: .venv/.test-ready sandbox
	.venv/bin/python -m pytest -n auto --dist loadfile

check: .venv/.test-ready
	.venv/bin/ruff check src tests benchmarks setup.py

clean:
	rm -rf .venv build src/*.egg-info
	find src -name '_native*.so' -delete
