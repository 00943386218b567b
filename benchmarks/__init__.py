"""Measure lazysnap: ``python -m benchmarks --help``. Figures and methods: docs/benchmarks.md."""
