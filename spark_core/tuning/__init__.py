"""Declared tuning of a host: kernel parameters, units, configuration of systemd and Docker, files of the owner.

All of it is off unless set; each value is journalled before, observed, and put back when it is no longer declared.
"""

from spark_core.tuning.apply import apply_tuning
from spark_core.tuning.items import ManagedFile, Place
from spark_core.tuning.notes import place_of, tuning_findings, tuning_look, tuning_notes
from spark_core.tuning.observe import (
    Tuning,
    TuningFacts,
    items_of,
    observe_tuning,
    owner_file,
    parse_tuning,
    tuning_fragments,
    tuning_of,
    values_of,
)

__all__ = [
    "ManagedFile",
    "Place",
    "Tuning",
    "TuningFacts",
    "apply_tuning",
    "items_of",
    "observe_tuning",
    "owner_file",
    "parse_tuning",
    "place_of",
    "tuning_findings",
    "tuning_fragments",
    "tuning_look",
    "tuning_notes",
    "tuning_of",
    "values_of",
]
