"""Fixtures of this tier."""

from __future__ import annotations

import tests.own_home  # noqa: F401  (before anything that looks for the home folder)
