"""Runs in a throw-away container of the serving image, before anything else does."""
