"""What would fail, found before anything changes: every node is looked at, and all findings are told together.

Nothing is pulled, left or started on a node. What our own group already uses (its ports, its containers) is no finding.
"""

from spark_core.preflight.look import Preflight, look_at_nodes
from spark_core.preflight.reach import reach_nodes

__all__ = ["Preflight", "look_at_nodes", "reach_nodes"]
