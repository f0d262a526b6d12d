"""The benchmark: every client against one truth server, on one core each. `python -m tests.bench --help`."""
