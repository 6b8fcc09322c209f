"""Metrics of the server, and their exposition for Prometheus together with those of the pool."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from asyncrl.rollout.replica import PoolStatistics

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class _Histogram:
    """Counts by upper bound; cheaper to add to than a library's, whose labels and locks are not needed here."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip((*map(str, _BOUNDS_S), "+Inf"), map(float, accumulate(self._counts)), strict=True))


class ServerMetrics:
    """Counters of the server, which only grow. Each is changed where its event happens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.captured_trajectories = 0
        self.captured_tokens = 0
        self.connections_refused = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        self.durations: defaultdict[str, _Histogram] = defaultdict(_Histogram)
        self.first_tokens = _Histogram()

    def add_request(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.durations[route].add(seconds)


class _Snapshot(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition(
    server: ServerMetrics,
    pool: PoolStatistics,
    *,
    generations: int,
    sessions: int,
    session_tokens: int,
    incomplete_groups: int,
) -> bytes:
    """Return all metrics in Prometheus' text format."""
    gauges = _gauges(
        {
            "asyncrl_generations_running": ("Choices that are being generated.", generations),
            "asyncrl_sessions": ("Sessions held.", sessions),
            "asyncrl_session_tokens": ("Tokens that sessions hold.", session_tokens),
            "asyncrl_incomplete_groups": ("Groups that wait for a member's reward.", incomplete_groups),
        }
    )
    registry = CollectorRegistry()
    registry.register(_Snapshot([*_server_metrics(server), *_pool_metrics(pool), *gauges]))
    return generate_latest(registry)


def _gauges(values: dict[str, tuple[str, float]]) -> list[Metric]:
    return [GaugeMetricFamily(name, text, value=value) for name, (text, value) in values.items()]


def _server_metrics(server: ServerMetrics) -> list[Metric]:
    requests = CounterMetricFamily("asyncrl_requests", "Requests answered.", labels=["route", "status"])
    for (route, status), count in sorted(server.requests.items()):
        requests.add_metric([route, str(status)], count)
    durations = HistogramMetricFamily("asyncrl_request_seconds", "Time from a request to its answer.", labels=["route"])
    for route, histogram in sorted(server.durations.items()):
        durations.add_metric([route], histogram.buckets(), histogram.total_s)
    first = HistogramMetricFamily("asyncrl_first_token_seconds", "Time from a request to its first tokens.")
    first.add_metric([], server.first_tokens.buckets(), server.first_tokens.total_s)
    counters = {
        "asyncrl_prompt_tokens": ("Prompt tokens of generations.", server.prompt_tokens),
        "asyncrl_sampled_tokens": ("Tokens that the pool generated.", server.sampled_tokens),
        "asyncrl_captured_trajectories": ("Trajectories stored with a reward.", server.captured_trajectories),
        "asyncrl_captured_tokens": ("Sampled tokens in them.", server.captured_tokens),
        "asyncrl_connections_refused": ("Connections beyond the limit.", server.connections_refused),
    }
    return [
        requests,
        durations,
        first,
        *(CounterMetricFamily(name, text, value=value) for name, (text, value) in counters.items()),
    ]


def _pool_metrics(pool: PoolStatistics) -> list[Metric]:
    ended = CounterMetricFamily("asyncrl_pool_generations", "Generations by how they ended.", labels=["end"])
    for end in ("finished", "aborted", "failed", "left"):
        ended.add_metric([end], getattr(pool, end))
    serving = GaugeMetricFamily("asyncrl_replica_serving", "1 while it serves.", labels=["replica", "state"])
    version = GaugeMetricFamily("asyncrl_replica_weight_version", "Version that it samples under.", labels=["replica"])
    running = GaugeMetricFamily("asyncrl_replica_requests", "Requests on it.", labels=["replica"])
    for replica in pool.replicas:
        serving.add_metric([replica.name, replica.state], float(replica.serving))
        running.add_metric([replica.name], replica.requests)
        if replica.weight_version is not None:
            version.add_metric([replica.name], replica.weight_version)
    return [
        ended,
        serving,
        version,
        running,
        CounterMetricFamily(
            "asyncrl_pool_migrations", "Generations continued on another replica.", value=pool.migrations
        ),
        CounterMetricFamily("asyncrl_pool_restarts", "Engines restarted.", value=pool.restarts),
        *_gauges(
            {
                "asyncrl_weight_version": ("Version that the pool serves.", pool.weight_version),
                "asyncrl_pool_paused": ("1 while decoding is paused.", float(pool.paused)),
                "asyncrl_pool_running": ("Generations on a replica.", pool.running),
                "asyncrl_pool_waiting": ("Generations that wait for a replica.", pool.waiting),
            }
        ),
    ]
