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
# what of a sink's tests runs on servers of other versions: SELECTED= for all
SELECTED ?= -m "not thorough"
# the major version of OpenSearch for them, and the tests that run on it
OPENSEARCH ?= 2
ON_OPENSEARCH := tests/contract/test_elasticsearch*.py \
	tests/integration/test_elasticsearch*.py tests/integration/test_opensearch*.py \
	tests/failure/test_*_elasticsearch.py tests/failure/test_three_sinks.py tests/failure/test_two_copies.py tests/failure/test_letters_faults.py
VERSIONS ?= oldest newest
# servers of other versions than `services up` starts
SERVERS ?= kafka-3.5.2 kafka-3.9.1 kafka-4.1.1 kafka-4.3.1 postgres-14.24 elasticsearch-9.5.3
MINUTES ?= 10
# what the proof's runs have found, a file each
RECORDS ?= docs/explanation/proof
# the JSON and pictures of benchmarks, and those of experiments
RESULTS ?= benchmarks
KEEP ?= experiments
EXPERIMENTS := windowed_counts_kafka late_rows output_commit rescale back_pressure inspect_state distinct_strings state_backends
# Flink wants other versions of much that is in the environment
FLINK := $(VENV)/flink
FLINK_VERSION := $(shell sed -n 's/^FLINK: Final = "\(.*\)"/\1/p' tests/support/flink_jars.py)
# the site has no package in common with the library
DOCS := $(VENV)/docs
RELEASE := $(VENV)/release
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' connectors/epochsink/__init__.py)
WHEEL := $$(ls -t $(CURDIR)/dist/epochsink-*.whl | head -1)
PYTEST := $(RUN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
# what the tests start
SERVICES := kafka postgres elasticsearch opensearch registry
# which share of the fault plans and of the experiments runs: another one each day
DAY := $(shell echo $$(( $$(date +%s) / 86400 )))
INSTRUMENT := PYTHONPATH=tests:tests/support:tests/instruments:tests/instruments/benchmarks $(RUN)/python
PIP := $(RUN)/python -m pip install --quiet --disable-pip-version-check
comma := ,

# what `make bench` can run, each with its arguments
BENCH_public := bench_public.py --keep $(RESULTS)
BENCH_postgres := bench_postgres.py --keep $(RESULTS)
BENCH_kafka := bench_kafka.py --keep $(RESULTS)
BENCH_elasticsearch := bench_elasticsearch.py --keep $(RESULTS)
BENCH_fair-copy := bench_postgres.py --keep $(RESULTS) --only fair-copy
BENCH_flink := bench_flink.py --keep $(RESULTS) --python $(FLINK)/bin/python
BENCH_epoch := bench_epoch.py $(if $(OLD),--against $(OLD))
BENCH_against = bench_against.py $(or $(OLD),$(error name the older code: make bench ONLY=against OLD=other/connectors))
BENCH_checkpoint := bench_checkpoint.py
BENCH_connect := bench_connect.py
BENCH_progress := bench_progress.py
BENCH_wide := bench_wide.py
BENCH_latency := bench_latency.py --keep $(RESULTS) --python $(FLINK)/bin/python
BENCH_outage := bench_outage.py --minutes $(MINUTES) --keep $(RESULTS)
BENCHMARKS := public postgres kafka elasticsearch fair-copy flink epoch against checkpoint connect progress wide latency outage
PROOFS := simulation kills connect options requests pairs mutants soak scoreboard stores
CHOSEN := $(subst $(comma), ,$(ONLY))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all on-elasticsearch9 on-opensearch on-versions on-servers on-containers on-containers-round on-programs on-yarn lint format docs bench prove release lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "make test ON=versions             the wheel on the oldest and newest that it allows (VERSIONS=4.1); or ON=elasticsearch9, opensearch,"
	@echo "                                  servers (SERVERS=kafka-3.9.1), containers, containers-round, programs (Chromium, ...), yarn"
	@echo "make bench ONLY=kafka,epoch       of $(BENCHMARKS) experiments;"
	@echo "                                  OLD=other/connectors for against and epoch, MINUTES=10 for outage, ARGS= for the program"
	@echo "make prove ONLY=kills,soak        of $(PROOFS);"
	@echo "                                  MINUTES=10 SEED=n, SHARE=0/1 for all plans or mutants, ARGS= for the program"

$(STAMP): locks/requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "epochsink needs Python 3.11: install it (e.g. apt-get install python3.11 python3.11-venv), or name yours: make PYTHON=python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "epochsink needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v java >/dev/null || { echo "Spark and the services need Java 17: install it (e.g. apt-get install openjdk-17-jre-headless)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@for try in 1 2 3 4 5; do \
		$(PIP) --require-hashes -r locks/requirements.lock && $(PIP) --no-deps --editable . && break; \
		test $$try -lt 5 || exit 1; echo "installing failed, trying again"; sleep $$((try * 5)); \
	done
	touch $@

venv: $(STAMP) ## the virtual environment with everything in it

demo: $(STAMP) ## kill a real pipeline, with and without epochsink, and count the rows; ALL=1: seven kills, into all three sinks
	$(RUN)/epochsink demo $(if $(ALL),,--quick)

ifdef ON
test: on-$(ON)
else
test: $(STAMP) ## the tests, on real services, without those that take longer than 1.5 seconds; ON= something else, see below
	@$(RUN)/epochsink services fetch $(SERVICES) # beforehand: a download counts against no test's time
	EPOCHSINK_SHARE=$(DAY)/48 $(PYTEST) -m "not thorough"
endif

test-all: FILES = $(if $(SHARE),--files $(SHARE))
test-all: $(STAMP) ## what `make test` leaves out: the long tests, a twelfth of the fault plans and of the experiments; SHARE=0/2: of every second file
	@$(RUN)/epochsink services fetch $(SERVICES)
	EPOCHSINK_SHARE=$(DAY)/12 $(PYTEST) $(FILES) -m "thorough or plans"
	$(PYTEST) $(FILES) --connect $$(grep -l pytest.mark.connect tests/*/test_*.py) # the same tests a second time, on Spark Connect

$(ELASTICSEARCH9)/.installed-from-lock: $(STAMP) locks/elasticsearch9.lock
	@rm -rf $(ELASTICSEARCH9)
	$(PIP) --no-deps --target $(ELASTICSEARCH9) --require-hashes -r locks/elasticsearch9.lock
	touch $@

# what talks to Elasticsearch, with client and server of version 9 (make test: 8)
on-elasticsearch9: $(ELASTICSEARCH9)/.installed-from-lock
	@PYTHONPATH=$(ELASTICSEARCH9) $(RUN)/epochsink services fetch
	@PYTHONPATH=$(ELASTICSEARCH9) $(RUN)/python -c 'import elasticsearch as e; assert e.__version__[0] == 9, e.__file__'
	PYTHONPATH=$(ELASTICSEARCH9) $(PYTEST) $(SELECTED) $(wildcard tests/*/test_elasticsearch*.py)

# what talks to Elasticsearch, with OpenSearch in its place, and OpenSearch's own tests: on 2.19 or (OPENSEARCH=3) 3.9; kills: SELECTED=
on-opensearch: $(STAMP)
	@$(RUN)/epochsink services fetch kafka postgres opensearch
	EPOCHSINK_TESTS_ON_OPENSEARCH=$(OPENSEARCH) $(PYTEST) $(SELECTED) $(wildcard $(ON_OPENSEARCH))

# the wheel in fresh environments: oldest and newest that pyproject.toml allows (or VERSIONS="4.1 4.2")
on-versions: $(STAMP)
	$(RUN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@EPOCHSINK_VERSIONS="$(VERSIONS)" $(RUN)/python tests/instruments/versions/environments.py $(WHEEL) $(VENV)/versions
	@printf '%s\n' $(VERSIONS) | EPOCHSINK_WHEEL=$(WHEEL) EPOCHSINK_ENVIRONMENTS=$(VENV)/versions \
		xargs -P 2 -I{} env EPOCHSINK_VERSIONS={} $(RUN)/pytest tests/instruments/versions

# a sink's contract and integration tests on its server in other versions (or SERVERS="kafka-4.2.2 postgres-16.10")
on-servers: $(STAMP)
	@set -e; for server in $(SERVERS); do ( \
		name=$${server%%-*}; export EPOCHSINK_$$(echo $$name | tr a-z A-Z)=$${server#*-}; echo "== $$server"; \
		$(RUN)/epochsink services fetch $$name; $(PYTEST) $(SELECTED) tests/contract/test_$${name}*.py tests/integration/test_$${name}*.py; \
	); done

# the sinks' contract and integration tests on containers in place of processes
on-containers: $(STAMP)
	@$(RUN)/epochsink services fetch
	docker/test-containers $(RUN)/python $(CONTAINER_TESTS)

# a part of them within 8 minutes; says in one line what this machine lacks, if anything
on-containers-round: $(STAMP)
	@$(RUN)/epochsink services fetch
	@docker/round $(RUN)/python $(CONTAINER_ROUND)

# the pages of demo and report in Chromium, alerts and dashboard in Prometheus, an example on MariaDB: installs them from Debian's packages
on-programs: $(STAMP)
	@tests/instruments/programs/round $(RUN)/python

# a pipeline on YARN, whose executors are killed (EPOCHSINK_KILLS= of them) and preempted, and whose nodes and application masters hang and are killed
on-yarn: $(STAMP)
	@$(RUN)/epochsink services fetch kafka postgres elasticsearch hdfs
	$(RUN)/pytest -n 0 -rP -p no:cacheprovider tests/instruments/yarn

lint: $(STAMP) ## ruff and mypy --strict
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(STAMP) ## let ruff format the code
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(FLINK)/.installed-$(FLINK_VERSION):
	$(PYTHON) -m venv $(FLINK)
	$(FLINK)/bin/pip install --quiet --disable-pip-version-check "setuptools<80" apache-flink==$(FLINK_VERSION)
	touch $@

bench: $(STAMP) $(if $(filter flink latency,$(CHOSEN)),$(FLINK)/.installed-$(FLINK_VERSION)) ## each sink against other writers, or what ONLY= names
	@set -e; $(foreach name,$(subst experiments,$(EXPERIMENTS),$(or $(CHOSEN),postgres kafka elasticsearch)), \
		$(if $(filter $(name),$(EXPERIMENTS)),$(RUN)/python examples/experiments/$(name).py --keep $(KEEP) $(ARGS), \
		$(INSTRUMENT) tests/instruments/benchmarks/$(or $(BENCH_$(name)),$(error no benchmark "$(name)": ONLY=a$(comma)b of $(BENCHMARKS) experiments)) $(ARGS));)

prove: $(STAMP) $(if $(filter scoreboard,$(CHOSEN)),$(FLINK)/.installed-$(FLINK_VERSION)) ## a round of each proof that says what was tried and found, 10 minutes each, or what ONLY= names
	@$(RUN)/epochsink services fetch
	@$(INSTRUMENT) -m proof.run --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(if $(SHARE),--share $(SHARE)) \
		--keep $(RECORDS) $(if $(ARGS),-- $(ARGS))

$(DOCS)/.installed-from-lock: locks/docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r locks/docs.lock
	touch $@

docs: $(DOCS)/.installed-from-lock ## the site, in ./site/VERSION beside those built before; broken links and anchors are errors, and so is a page that loads anything from elsewhere
	@rm -rf site/$(VERSION)
	@NO_MKDOCS_2_WARNING=1 SITE_NAME="epochsink $(VERSION)" $(DOCS)/bin/mkdocs build --site-dir site/$(VERSION) > $(DOCS)/build.log 2>&1 || \
		{ grep -v '^INFO' $(DOCS)/build.log; exit 1; } # with --quiet it counts no warnings
	@! grep -rnoE '(<(script|img|iframe|source)[^>]* src|<link[^>]*rel="(stylesheet|preconnect|icon)"[^>]* href)="?(https?:)?//[^">]*' site/$(VERSION) --include='*.html'
	@cd site && ls -d [0-9]*/ | sort --version-sort --reverse | sed 's|\(.*\)/|"\1"|' | paste -sd, | sed 's/.*/window.siteVersions = [&]/' > versions.js
	@echo site/$(VERSION)/index.html

$(RELEASE)/.installed-from-lock: locks/release.lock
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r locks/release.lock
	touch $@

release: $(STAMP) $(RELEASE)/.installed-from-lock ## in ./dist: sdist, wheel from it (tried in an empty environment), SBOM, checksums with the commit, signed: SIGN=ssh-key
	@test -z "$$(git status --porcelain)" || { echo "commit first: a release is built from what is committed"; exit 1; }
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist . > $(RELEASE)/build.log 2>&1 || { cat $(RELEASE)/build.log; exit 1; }
	$(RELEASE)/bin/twine check --strict dist/*
	cd dist && { echo "# epochsink $(VERSION), commit $$(git rev-parse HEAD)"; sha256sum epochsink-*; } > SHA256SUMS
	$(MAKE) test ON=versions VERSIONS=newest
	cd dist && sha256sum --check --quiet SHA256SUMS # that builds the wheel again: the same bytes, or it tried another one
	$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --output-file dist/epochsink-$(VERSION).cdx.json $(VENV)/versions/newest/bin/python
	cd dist && sha256sum epochsink-*.cdx.json >> SHA256SUMS
	$(if $(SIGN),ssh-keygen -Y sign -q -f $(SIGN) -n epochsink dist/SHA256SUMS)
	@ls dist

lock: ## pin the newest versions that pyproject.toml allows
	@command -v uv >/dev/null || { echo "the lock file is made by uv: pip install uv"; exit 1; }
	uv pip compile --quiet --group dev --all-extras --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file locks/requirements.lock pyproject.toml
	uv pip compile --quiet --group elasticsearch9 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file locks/elasticsearch9.lock
	uv pip compile --quiet --group docs --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file locks/docs.lock
	uv pip compile --quiet --group release --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes \
		--output-file locks/release.lock
	uv pip compile --quiet --extra spark --extra kafka --extra postgres --extra elasticsearch --extra opensearch --resolution lowest-direct --python-version 3.11 \
		--no-header --no-annotate --no-emit-index-url --output-file locks/versions-oldest.lock pyproject.toml

clean: ## remove the virtual environment and what was built
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache
