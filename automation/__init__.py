"""Commands around the program, for people and for CI: ``python -m automation --help``."""
