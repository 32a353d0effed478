"""Proofs of the fabric, made during ``up``: packets of the full size, bandwidth, and a collective in the serving image.

The packets are light and always sent. Bandwidth and collective load the link and the GPU, so they are tried on idle
nodes only, unless ``fabric.proof`` asks for them always.
"""

from spark_core.proof.prove import FabricReport, ProofRun, prove_fabric

__all__ = ["FabricReport", "ProofRun", "prove_fabric"]
