"""Code environments: agents' programs run in a sandbox and are judged by hidden tests."""
