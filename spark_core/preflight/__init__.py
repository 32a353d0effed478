"""What would fail, found before anything changes: every node is looked at, and all findings are told together.

Nothing is pulled, left or started on a node. What our own group already uses (its ports, its containers) is no finding.
"""
