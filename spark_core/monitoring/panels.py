"""What the dashboard answers, question by question: is it serving, how fast, how full, what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spark_core.monitoring.metrics import (
    BOOTED,
    CANARY_AGE,
    CANARY_SECONDS,
    CPU,
    DISK_FREE,
    DISK_SIZE,
    EACH_TOKEN,
    FAILURES,
    FINISHED,
    FIRST_TOKEN,
    GENERATED,
    GENERATION,
    KV_CACHE,
    LEASE_AGE,
    MEMORY_AVAILABLE,
    MEMORY_TOTAL,
    NET_SENT,
    PHASE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPTED,
    RANK_PHASE,
    RDMA_SENT,
    RUNNING,
    SERVING,
    SWAP_FREE,
    SWAP_TOTAL,
    UP,
    WAITING,
    WHOLE_REQUEST,
    Metric,
)

Kind = Literal["stat", "timeseries", "state-timeline", "gauge"]
Unit = Literal["none", "s", "bytes", "Bps", "percentunit", "reqps", "tokens/s"]
_WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One query, and how its series are named."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        width: Of 24 columns.
        text: What it shows and when that is bad, for who does not know.
        steps: (from this value, colour), the lowest first.
        words: Value to (word, colour), for states.
    """

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    text: str
    unit: Unit = "none"
    width: int = 8
    height: int = 7
    steps: tuple[tuple[float | None, str], ...] = ()
    words: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A question with the panels that answer it."""

    question: str
    panels: tuple[Panel, ...]


def quantile(share: float, buckets: Metric) -> str:
    """A quantile of a histogram over all series of a model."""
    return f"histogram_quantile({share:g}, sum by (le, model_name) (rate({buckets}[{_WINDOW}])))"


def _rate(metric: Metric, by: str = "") -> str:
    return f"sum by ({by}) (rate({metric}[{_WINDOW}]))" if by else f"sum(rate({metric}[{_WINDOW}]))"


_NOT_SCRAPED = "red where the head could not be asked"
_GOOD_FROM_1: tuple[tuple[float | None, str], ...] = ((None, "red"), (1, "green"))

SECTIONS = (
    Section(
        "Is it serving?",
        (
            Panel(
                "Serving", "stat", (Query(f"min({SERVING}) or vector(0)", "serving"),),
                f"Whether a completion is known to come back; {_NOT_SCRAPED}.",
                width=4, height=5, steps=_GOOD_FROM_1, words={0: ("no", "red"), 1: ("yes", "green")},
            ),
            Panel(
                "Phase", "stat", (Query(f"{PHASE} == 1", "{{phase}}"),),
                "The phase that the group is in now.", width=4, height=5, words={1: ("now", "blue")},
            ),
            Panel(
                "Last good completion", "stat", (Query(str(CANARY_AGE), "{{group}}"),),
                "Seconds since a completion came back or real requests made progress.", "s",
                width=4, height=5, steps=((None, "green"), (60, "orange"), (180, "red")),
            ),
            Panel(
                "Canary", "stat", (Query(str(CANARY_SECONDS), "{{group}}"),),
                "How long the supervisor's own last completion took.", "s", width=4, height=5,
            ),
            Panel(
                "Ranks", "state-timeline", (Query(f"{LEASE_AGE} < bool 25", "rank {{rank}} on {{node}}"),),
                "Whether the head has heard of each rank in time.", width=8, height=5,
                words={0: ("silent", "red"), 1: ("heard", "green")},
            ),
        ),
    ),
    Section(
        "How fast?",
        (
            Panel(
                "Tokens", "timeseries",
                (Query(_rate(GENERATED, "model_name"), "answered"), Query(_rate(PROMPTED, "model_name"), "read")),
                "Tokens per second of all requests together.", "tokens/s",
            ),
            Panel(
                "Time to the first token", "timeseries",
                (Query(quantile(0.5, FIRST_TOKEN), "half of them"), Query(quantile(0.99, FIRST_TOKEN), "99 %")),
                "How long users wait until an answer begins.", "s",
            ),
            Panel(
                "Time for each further token", "timeseries",
                (Query(quantile(0.5, EACH_TOKEN), "half of them"), Query(quantile(0.99, EACH_TOKEN), "99 %")),
                "How fast an answer then goes on.", "s",
            ),
            Panel(
                "Whole requests", "timeseries",
                (Query(quantile(0.5, WHOLE_REQUEST), "half of them"), Query(quantile(0.99, WHOLE_REQUEST), "99 %")),
                "From the request to the end of its answer.", "s",
            ),
            Panel(
                "Requests that ended", "timeseries",
                (Query(_rate(FINISHED, "finished_reason"), "{{finished_reason}}"),),
                "By why they ended: stop is the model's own end, length the limit of the request.", "reqps",
            ),
            Panel(
                "Fabric", "timeseries",
                (
                    Query(_rate(RDMA_SENT, "node, device"), "{{node}} {{device}} RDMA"),
                    Query(_rate(NET_SENT, "node, device"), "{{node}} {{device}}"),
                ),
                "What nodes send. Traffic over RDMA is in no counter of a network device.", "Bps",
            ),
        ),
    ),
    Section(
        "How full?",
        (
            Panel(
                "Requests", "timeseries", (Query(f"sum({RUNNING})", "running"), Query(f"sum({WAITING})", "waiting")),
                "Many waiting while the cache is full: the model is asked for more than fits.",
            ),
            Panel(
                "KV cache", "timeseries", (Query(f"max({KV_CACHE})", "used"),),
                "Share of the memory for contexts that is in use.", "percentunit",
                steps=((None, "green"), (0.8, "orange"), (0.95, "red")),
            ),
            Panel(
                "Prompts known from before", "timeseries",
                (Query(f"{_rate(PREFIX_HITS)} / {_rate(PREFIX_QUERIES)}", "share"),),
                "Share of prompt tokens that the prefix cache already had.", "percentunit",
            ),
            Panel(
                "Memory available", "timeseries", (Query(str(MEMORY_AVAILABLE), "{{node}}"),),
                "A Spark has one memory for all; below 2 GiB it is close to not answering.", "bytes",
                steps=((None, "red"), (2 * 2**30, "orange"), (4 * 2**30, "green")),
            ),
            Panel(
                "Memory, swap and disk in use", "gauge",
                (
                    Query(f"1 - {MEMORY_AVAILABLE} / {MEMORY_TOTAL}", "{{node}} memory"),
                    Query(f"1 - {SWAP_FREE} / ({SWAP_TOTAL} > 0)", "{{node}} swap"),
                    Query(f'1 - {DISK_FREE}{{mountpoint="/"}} / {DISK_SIZE}{{mountpoint="/"}}', "{{node}} disk"),
                ),
                "Shares. Swap in use beside a model means that something did not fit.", "percentunit",
                steps=((None, "green"), (0.9, "orange"), (0.97, "red")),
            ),
            Panel(
                "Processors", "timeseries",
                (Query(f'1 - avg by (node) (rate({CPU}{{mode="idle"}}[{_WINDOW}]))', "{{node}}"),),
                "Share of the processors' time in use.", "percentunit",
            ),
        ),
    ),
    Section(
        "What happened?",
        (
            Panel(
                "Phases of the group", "state-timeline", (Query(f"{PHASE} == 1", "{{phase}}"),),
                "Which phase it was in when.", width=12, height=9, words={1: ("in it", "blue")},
            ),
            Panel(
                "Phases of the ranks", "state-timeline", (Query(str(RANK_PHASE), "{{node}}: {{phase}}"),),
                "The same of each rank, as the head heard it.", width=12, height=9, words={1: ("in it", "blue")},
            ),
            Panel(
                "Generations", "timeseries",
                (Query(f"max({GENERATION})", "number"), Query(f"max({FAILURES})", "failed since it last served")),
                "A step up is a new start of the whole group; its first error is in `report`.",
            ),
            Panel(
                "Requests put off", "timeseries", (Query(_rate(PREEMPTIONS), "each second"),),
                "Preempted for lack of KV cache, and computed again.", "reqps",
            ),
            Panel(
                "Nodes up for", "timeseries", (Query(f"time() - {BOOTED}", "{{node}}"),),
                "A line that falls to zero is a reboot.", "s",
            ),
            Panel(
                "Who could not be asked", "state-timeline", (Query(UP, "{{job}} {{node}}"),),
                "Targets of Prometheus.", words={0: ("silent", "red"), 1: ("answers", "green")},
            ),
            Panel(
                "Alerts", "state-timeline", (Query('ALERTS{alertstate="firing"}', "{{alertname}} {{node}}"),),
                "Rules that fire; their texts, with what to do, are on Prometheus' own page.", width=24,
                words={1: ("fires", "red")},
            ),
        ),
    ),
)  # fmt: skip
"""The dashboard, from top to bottom."""
