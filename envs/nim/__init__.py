"""Nim: two players take objects from heaps; the last object wins."""
