"""The rank supervisor's protocol under simulated time, network, Docker and hosts.

It drives the very file that the containers run (``spark_runtime/protocol.py``), or a mutant of it. A schedule of
faults is random by seed, or one of all short ones. ``python -m tests.simulation --help``.
"""
