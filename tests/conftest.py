"""For all tiers: the project folder on the module path, and properties with the same cases every time."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

# A busy machine must not fail a property for its time, and no examples are kept in the checkout.
settings.register_profile(
    "spark-vllm",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("spark-vllm")
