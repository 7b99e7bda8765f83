"""Benchmark suites: the same tasks for everybody, results that anybody can check.

`suite` reads a suite's file, `run` plays it into a folder, `verify` says whether a folder holds, `compare`
puts two of them side by side.
"""
