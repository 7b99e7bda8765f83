"""Configuration: typed settings read from YAML files and ``key=value`` overrides.

loader.py     load, dump, diff, find: the interface
settings.py   Settings, Closed, Renames, and how to walk a tree of models
yaml.py       the YAML subset, with the line of every value
errors.py     validation errors as messages
explain.py    the table of all keys, and the JSON schema
"""
