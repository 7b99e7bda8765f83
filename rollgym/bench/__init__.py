"""Benchmark suites: fixed tasks, and results that can be verified.

`suite` reads a suite's file, `run` runs it and writes a results folder, `verify` checks such a folder,
`compare` compares two of them.
"""
