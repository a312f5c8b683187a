"""Benchmarks: `kvctl bench`. What they measure and print: docs/benchmarks.md."""
