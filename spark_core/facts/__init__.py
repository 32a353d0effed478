"""Facts of a node: the questions of one round trip, and pure parsers of the answers, one subject in each module."""

from spark_core.facts.answer import Answer, Fact, Unread, known
from spark_core.facts.node import NodeFacts, parse_facts
from spark_core.facts.questions import FactsSpec, facts_fragment

__all__ = ["Answer", "Fact", "FactsSpec", "NodeFacts", "Unread", "facts_fragment", "known", "parse_facts"]
