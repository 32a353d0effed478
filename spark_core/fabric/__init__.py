"""The RoCE fabric of a node: what it is, what it should be, and the one netplan file that is ours.

A netplan file is written only if ``fabric.manage`` is set; otherwise the fabric is checked and never changed.
"""
