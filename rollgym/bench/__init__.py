"""Benchmark suites: fixed tasks, and results that can be verified.

`suite` reads a suite's file, `run` runs it and writes a results folder, `results` reads and compares such
folders, `verify` checks one.
"""
