# Everything that a fresh machine with Python 3.11 and Java 17 needs: `make demo`, `make test`.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-lock
# the client's next major version with all that it needs, in a folder that goes before the environment's own packages
ELASTICSEARCH9 := $(VENV)/elasticsearch9
CONTAINER_TESTS ?= tests/contract $(wildcard tests/integration/test_*commit.py) tests/integration/test_kafka_outage.py \
	tests/integration/test_postgres_outcomes.py tests/integration/test_elasticsearch_faults.py tests/failure/test_three_sinks.py examples/test_pipeline.py
CONTAINER_ROUND ?= examples/test_pipeline.py tests/contract/test_postgres.py tests/contract/test_elasticsearch.py
# what of Elasticsearch's tests runs with version 9: SELECTED= for all
SELECTED ?= -m "not thorough"
SINKS ?= kafka,postgres,elasticsearch
HOURS ?= 1
MINUTES ?= 10
# what the proof's runs have found, a file each
RECORDS ?= docs/explanation/proof
KILLS ?= 8
VERSIONS ?= oldest newest
EXPERIMENTS ?= windowed_counts_kafka late_rows output_commit rescale back_pressure inspect_state \
	distinct_strings state_backends
KEEP ?= experiments
RESULTS ?= benchmarks
SHARE ?= 0/1
# Flink wants other versions of much that is in the environment
FLINK := $(VENV)/flink
FLINK_VERSION := $(shell sed -n 's/^FLINK: Final = "\(.*\)"/\1/p' tests/support/flink_jars.py)
# the site has no package in common with the library
DOCS := $(VENV)/docs
RELEASE := $(VENV)/release
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' connectors/epochsink/__init__.py)
WHEEL = $(firstword $(wildcard $(CURDIR)/dist/epochsink-*.whl))
PYTEST := $(RUN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
# what the tests start
SERVICES := kafka postgres elasticsearch registry
# which share of the fault plans and of the experiments runs: another one each day
DAY := $(shell echo $$(( $$(date +%s) / 86400 )))
PROVE := PYTHONPATH=tests:tests/support:tests/benchmarks $(RUN)/python -m
PIP := $(RUN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all durations test-containers test-containers-round soak scoreboard test-elasticsearch9 test-versions test-programs lint format prove request-faults mutants mutants-share prove-stores bench bench-postgres bench-kafka bench-elasticsearch bench-fair-copy bench-flink bench-epoch bench-against bench-checkpoint bench-connect bench-progress bench-wide bench-outage experiments docs wheel release lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "epochsink needs Python 3.11: install it (e.g. apt-get install python3.11 python3.11-venv), or name yours: make PYTHON=python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "epochsink needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v java >/dev/null || { echo "Spark and the services need Java 17: install it (e.g. apt-get install openjdk-17-jre-headless)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@for try in 1 2 3 4 5; do \
		$(PIP) --require-hashes -r requirements.lock && $(PIP) --no-deps --editable . && break; \
		test $$try -lt 5 || exit 1; echo "installing failed, trying again"; sleep $$((try * 5)); \
	done
	touch $@

venv: $(STAMP) ## the virtual environment with everything in it

demo: $(STAMP) ## kill a real pipeline again and again, with and without epochsink, and count the rows
	$(RUN)/epochsink demo

test: $(STAMP) ## the tests, on real services, without those that take longer than two seconds
	@$(RUN)/epochsink services fetch $(SERVICES) # beforehand: a download counts against no test's time
	EPOCHSINK_SHARE=$(DAY)/16 $(PYTEST) -m "not thorough"

test-all: $(STAMP) ## what `make test` leaves out: the long tests, an eighth of the fault plans and of the experiments
	@$(RUN)/epochsink services fetch $(SERVICES)
	EPOCHSINK_SHARE=$(DAY)/8 $(PYTEST) -m "thorough or plans"
	$(PYTEST) --connect $$(grep -l pytest.mark.connect tests/*/test_*.py) # the same tests a second time, on Spark Connect

durations: $(STAMP) ## run all tests, and record how long each takes: so two processes end at about the same time
	@$(RUN)/epochsink services fetch
	$(PYTEST) --record-durations

test-containers-round: $(STAMP) ## a part of test-containers within 8 minutes; says in one line what this machine lacks, if anything
	@$(RUN)/epochsink services fetch
	@docker/round $(RUN)/python $(CONTAINER_ROUND)

soak: $(STAMP) ## faults at random on a cluster of hosts, as root: HOURS=1 SEED=n SINKS=kafka,postgres,elasticsearch
	@$(RUN)/epochsink services fetch
	@$(PROVE) nemesis.run --sinks $(SINKS) --hours $(HOURS) $(if $(SEED),--seed $(SEED)) --keep $(RECORDS)

scoreboard: $(STAMP) $(FLINK)/.installed-$(FLINK_VERSION) ## the same kills for what people use today, side by side with this library: KILLS=8 SEED=n (ONLY=spark-kafka,...)
	@$(RUN)/epochsink services fetch
	@PYTHONPATH=tests:tests/support exec $(RUN)/python -m scoreboard.run --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

$(ELASTICSEARCH9)/.installed-from-lock: $(STAMP) elasticsearch9.lock
	@rm -rf $(ELASTICSEARCH9)
	$(PIP) --no-deps --target $(ELASTICSEARCH9) --require-hashes -r elasticsearch9.lock
	touch $@

test-elasticsearch9: $(ELASTICSEARCH9)/.installed-from-lock ## what talks to Elasticsearch, with client and server of version 9 (make test: 8)
	@PYTHONPATH=$(ELASTICSEARCH9) $(RUN)/epochsink services fetch
	@PYTHONPATH=$(ELASTICSEARCH9) $(RUN)/python -c 'import elasticsearch as e; assert e.__version__[0] == 9, e.__file__'
	PYTHONPATH=$(ELASTICSEARCH9) $(PYTEST) $(SELECTED) $(wildcard tests/*/test_elasticsearch*.py)

test-containers: $(STAMP) ## the sinks' contract and integration tests on containers in place of processes
	@$(RUN)/epochsink services fetch
	docker/test-containers $(RUN)/python $(CONTAINER_TESTS)

test-versions: $(STAMP) wheel ## the wheel in fresh environments: oldest and newest that pyproject.toml allows (or VERSIONS="4.1 4.2")
	@EPOCHSINK_VERSIONS="$(VERSIONS)" $(RUN)/python tests/versions/environments.py $(WHEEL) $(VENV)/versions
	EPOCHSINK_VERSIONS="$(VERSIONS)" EPOCHSINK_WHEEL=$(WHEEL) EPOCHSINK_ENVIRONMENTS=$(VENV)/versions $(RUN)/pytest tests/versions

test-programs: $(STAMP) ## the demo's and the report's page in Chromium, alerts and dashboard in Prometheus: installs both from Debian's packages
	@tests/programs/round $(RUN)/python

lint: $(STAMP) ## ruff and mypy --strict
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(STAMP) ## let ruff format the code
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

prove: $(STAMP) ## a round of each proof, recorded, and docs/explanation/proof.md of all records: MINUTES=10 each, ONLY=soak,pairs SEED=n
	@$(RUN)/epochsink services fetch
	@$(PROVE) proof.run --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) --keep $(RECORDS)

request-faults: $(STAMP) ## a fault at every request of a query's life, on real servers: OF=kafka,postgres SHARE=3/16; or PAIRS=200 SEED=n; WORKERS=1 GUARDS=FILE
	@$(RUN)/epochsink services fetch
	@EPOCHSINK_SHARE=$(SHARE) $(PROVE) request_faults.run $(if $(OF),--of $(OF)) \
		$(if $(PAIRS),--pairs $(PAIRS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(WORKERS),--workers $(WORKERS)) $(if $(GUARDS),--guards $(GUARDS)) --keep $(RECORDS)

mutants: $(STAMP) ## change the source in one place at a time, and see that the tests named for it fail: FAMILIES=kafka,postgres
	@$(PROVE) mutants.run $(if $(FAMILIES),--families $(FAMILIES)) --keep $(RECORDS)

mutants-share: $(STAMP) ## a 32nd of the mutants, other ones each day
	@EPOCHSINK_SHARE=$(DAY)/32 PYTHONPATH=tests:tests/support $(RUN)/python -m mutants.run

prove-stores: $(STAMP) ## twenty kills each with the checkpoint on HDFS and on S3 (which fetches 530 MB)
	$(RUN)/python tests/failure/kills_on_stores.py

bench: bench-postgres bench-kafka bench-elasticsearch ## all benchmarks; results (JSON) and picture go to ./benchmarks

bench-postgres: $(STAMP) ## PostgreSQL against Spark's JDBC writer, bare COPY and executemany
	$(RUN)/python tests/benchmarks/bench_postgres.py --keep $(RESULTS)

bench-kafka: $(STAMP) ## Kafka against Spark's own sink
	$(RUN)/python tests/benchmarks/bench_kafka.py --keep $(RESULTS)

bench-fair-copy: $(STAMP) ## PostgreSQL against what can be reached: the same pass of Spark with rows discarded, and bare COPY
	$(RUN)/python tests/benchmarks/bench_postgres.py --keep $(RESULTS) --only fair-copy

$(FLINK)/.installed-$(FLINK_VERSION):
	$(PYTHON) -m venv $(FLINK)
	$(FLINK)/bin/pip install --quiet --disable-pip-version-check "setuptools<80" apache-flink==$(FLINK_VERSION)
	touch $@

bench-flink: $(STAMP) $(FLINK)/.installed-$(FLINK_VERSION) ## Kafka against Flink's KafkaSink (which fetches 500 MB)
	PYTHONPATH=tests/support $(RUN)/python tests/benchmarks/bench_flink.py --keep $(RESULTS) --python $(FLINK)/bin/python

bench-epoch: $(STAMP) ## an epoch with few rows or none, against a plain foreachBatch (AGAINST=other/connectors: and older code)
	$(RUN)/python tests/benchmarks/bench_epoch.py $(if $(AGAINST),--against $(AGAINST))

bench-against: $(STAMP) ## rows into each target, by this code and by that of OLD=other/connectors
	$(RUN)/python tests/benchmarks/bench_against.py $(OLD)

bench-elasticsearch: $(STAMP) ## Elasticsearch against parallel_bulk and the server's limit
	$(RUN)/python tests/benchmarks/bench_elasticsearch.py --keep $(RESULTS)

experiments: $(STAMP) ## the founding experiments, run exactly once; tables and pictures go to ./experiments (SIZE=--full: as in the original)
	@for name in $(EXPERIMENTS); do $(RUN)/python examples/experiments/$$name.py --keep $(KEEP) $(SIZE) || exit 1; done

bench-checkpoint: $(STAMP) ## checkpoints on a folder, on HDFS and on S3 (which fetches 530 MB), near and far away
	$(RUN)/python tests/benchmarks/bench_checkpoint.py

bench-connect: $(STAMP) ## an epoch on Spark Connect against one on a classic session: 1,000 rows, and 1 million
	$(RUN)/python tests/benchmarks/bench_connect.py

bench-progress: $(STAMP) ## what it costs to follow a query's progress: against a copy of epochsink that does not
	$(RUN)/python tests/benchmarks/bench_progress.py

bench-wide: $(STAMP) ## what an epoch of up to 1,000 tasks costs the driver
	$(RUN)/python tests/benchmarks/bench_wide.py

bench-outage: $(STAMP) ## what Prometheus, status and report say while a server is stopped for a minute: MINUTES=10 HOW=stopped (or frozen)
	$(RUN)/python tests/benchmarks/bench_outage.py --minutes $(MINUTES) --how $(or $(HOW),stopped) --keep $(RESULTS)

$(DOCS)/.installed-from-lock: docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r docs.lock
	touch $@

docs: $(DOCS)/.installed-from-lock ## the site, in ./site/VERSION beside those built before; broken links and anchors are errors, and so is a page that loads anything from elsewhere
	@rm -rf site/$(VERSION)
	@NO_MKDOCS_2_WARNING=1 SITE_NAME="epochsink $(VERSION)" $(DOCS)/bin/mkdocs build --site-dir site/$(VERSION) > $(DOCS)/build.log 2>&1 || \
		{ grep -v '^INFO' $(DOCS)/build.log; exit 1; } # with --quiet it counts no warnings
	@! grep -rnoE '(<(script|img|iframe|source)[^>]* src|<link[^>]*rel="(stylesheet|preconnect|icon)"[^>]* href)="?(https?:)?//[^">]*' site/$(VERSION) --include='*.html'
	@cd site && ls -d [0-9]*/ | sort --version-sort --reverse | sed 's|\(.*\)/|"\1"|' | paste -sd, | sed 's/.*/window.siteVersions = [&]/' > versions.js
	@echo site/$(VERSION)/index.html

wheel: $(STAMP) ## build the wheel
	$(RUN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

$(RELEASE)/.installed-from-lock: release.lock
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r release.lock
	touch $@

release: $(STAMP) $(RELEASE)/.installed-from-lock ## in ./dist: sdist, wheel from it (tried in an empty environment), SBOM, checksums with the commit, signed: SIGN=ssh-key
	@test -z "$$(git status --porcelain)" || { echo "commit first: a release is built from what is committed"; exit 1; }
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist . > $(RELEASE)/build.log 2>&1 || { cat $(RELEASE)/build.log; exit 1; }
	$(RELEASE)/bin/twine check --strict dist/*
	cd dist && { echo "# epochsink $(VERSION), commit $$(git rev-parse HEAD)"; sha256sum epochsink-*; } > SHA256SUMS
	$(MAKE) test-versions VERSIONS=newest
	cd dist && sha256sum --check --quiet SHA256SUMS # test-versions builds the wheel again: the same bytes, or it tried another one
	$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --output-file dist/epochsink-$(VERSION).cdx.json $(VENV)/versions/newest/bin/python
	cd dist && sha256sum epochsink-*.cdx.json >> SHA256SUMS
	$(if $(SIGN),ssh-keygen -Y sign -q -f $(SIGN) -n epochsink dist/SHA256SUMS)
	@ls dist

lock: ## pin the newest versions that pyproject.toml allows
	@command -v uv >/dev/null || { echo "the lock file is made by uv: pip install uv"; exit 1; }
	uv pip compile --quiet --group dev --all-extras --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file requirements.lock pyproject.toml
	uv pip compile --quiet --group elasticsearch9 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file elasticsearch9.lock
	uv pip compile --quiet --group docs --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file docs.lock
	uv pip compile --quiet --group release --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file release.lock
	uv pip compile --quiet --extra spark --extra kafka --extra postgres --extra elasticsearch --resolution lowest-direct --python-version 3.11 \
		--no-header --no-annotate --no-emit-index-url --output-file versions-oldest.lock pyproject.toml

clean: ## remove the virtual environment and what was built
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache
