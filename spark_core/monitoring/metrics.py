"""The metrics that dashboard and rules ask for, each with who exports it. A test holds them against what is exported.

Names: ours in spark_runtime/metrics.py; vLLM's in vllm/v1/metrics/loggers.py (0.32), where prometheus_client adds
``_total`` to counters and ``_bucket`` to histograms; node exporter's by its collectors meminfo, cpu, filesystem,
loadavg, netdev and infiniband.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["supervisor", "vllm", "node"]
JOBS: dict[Source, str] = {"supervisor": "spark-vllm", "vllm": "vllm", "node": "node"}
"""Name of the scrape job of each source."""


@dataclass(frozen=True)
class Metric:
    """One metric; as text it is its name, so that a query holds no name of its own."""

    name: str
    source: Source

    def __str__(self) -> str:
        return self.name


UP = "up"
"""Prometheus' own: whether a target could be scraped."""

SERVING = Metric("spark_vllm_serving", "supervisor")
PHASE = Metric("spark_vllm_phase", "supervisor")
GENERATION = Metric("spark_vllm_generation", "supervisor")
FAILURES = Metric("spark_vllm_failures_before_serving", "supervisor")
CANARY_SECONDS = Metric("spark_vllm_canary_seconds", "supervisor")
CANARY_AGE = Metric("spark_vllm_last_good_canary_age_seconds", "supervisor")
LEASE_AGE = Metric("spark_vllm_rank_lease_age_seconds", "supervisor")
RANK_PHASE = Metric("spark_vllm_rank_phase", "supervisor")

GENERATED = Metric("vllm:generation_tokens_total", "vllm")
PROMPTED = Metric("vllm:prompt_tokens_total", "vllm")
FIRST_TOKEN = Metric("vllm:time_to_first_token_seconds_bucket", "vllm")
EACH_TOKEN = Metric("vllm:inter_token_latency_seconds_bucket", "vllm")
WHOLE_REQUEST = Metric("vllm:e2e_request_latency_seconds_bucket", "vllm")
RUNNING = Metric("vllm:num_requests_running", "vllm")
WAITING = Metric("vllm:num_requests_waiting", "vllm")
KV_CACHE = Metric("vllm:kv_cache_usage_perc", "vllm")
PREEMPTIONS = Metric("vllm:num_preemptions_total", "vllm")
FINISHED = Metric("vllm:request_success_total", "vllm")
PREFIX_HITS = Metric("vllm:prefix_cache_hits_total", "vllm")
PREFIX_QUERIES = Metric("vllm:prefix_cache_queries_total", "vllm")

MEMORY_AVAILABLE = Metric("node_memory_MemAvailable_bytes", "node")
MEMORY_TOTAL = Metric("node_memory_MemTotal_bytes", "node")
SWAP_FREE = Metric("node_memory_SwapFree_bytes", "node")
SWAP_TOTAL = Metric("node_memory_SwapTotal_bytes", "node")
CPU = Metric("node_cpu_seconds_total", "node")
DISK_FREE = Metric("node_filesystem_avail_bytes", "node")
DISK_SIZE = Metric("node_filesystem_size_bytes", "node")
BOOTED = Metric("node_boot_time_seconds", "node")
NET_SENT = Metric("node_network_transmit_bytes_total", "node")
RDMA_SENT = Metric("node_infiniband_port_data_transmitted_bytes_total", "node")
"""Only where the node has RDMA devices; what goes over them is in no counter of a network device."""

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them."""
