"""Running code that nobody trusts, behind walls that say what they are."""
