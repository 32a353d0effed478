"""Whether nodes can be reached at all, and errors of the connection as findings."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence

from spark_core.errors import SparkError, UnreachableError
from spark_core.facts.docker import DOCKER_VERSION, docker_problem, may_change_with_login, parse_docker_version
from spark_core.findings import KINDS, Finding
from spark_core.settings import NodeSettings
from spark_core.transport.base import Transport, parse_sections, run_checked, script


def finding_of(error: SparkError, node: str) -> Finding:
    """An error met while looking at a node, as a finding of the kind that the error knows itself to be."""
    code = error.code if isinstance(error, UnreachableError) and error.code in KINDS else "observation-failed"
    seen = f" (seen: {error.evidence[-1].strip()})" if error.evidence else ""
    return Finding(code, error.where or node, error.what + seen, error.do)


def reach_nodes(nodes: Sequence[NodeSettings], open_node: Callable[[NodeSettings], Transport]) -> list[SparkError]:
    """Whether every node answers and its Docker daemon does; the errors of those that do not."""

    def reach(node: NodeSettings) -> SparkError | None:
        try:
            transport = open_node(node)
            text = run_checked(transport, script(DOCKER_VERSION), purpose="expected the version of Docker")
        except SparkError as error:
            return error
        found = parse_docker_version(parse_sections(text).get("docker", ""))
        if may_change_with_login(found):
            transport.log_in_again()
        problem = docker_problem(node.name, found)
        return None if problem is None else SparkError(problem.what, where=problem.where, do=problem.do)

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(4, min(16, len(nodes)))) as pool:
        return [error for error in pool.map(reach, nodes) if error is not None]
