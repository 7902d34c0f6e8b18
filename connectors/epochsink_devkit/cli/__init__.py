"""The devkit's verbs, a module each: `epochsink.cli.devkit` loads the one that is typed."""
