"""Chromium for environments: one browser per process, a separate context per episode, pages as text.

find.py    locates Chromium
host.py    starts, shares and closes browsers; `Seat` is an environment's place in one
tab.py     the page of one episode
tree.py    the accessibility tree as lines with a reference for each interactive element
"""
