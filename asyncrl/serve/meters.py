"""What happened at the server's face, and its telling in Prometheus' form."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from asyncrl.rollout.pool_status import PoolStatistics

__all__ = ["FaceStatistics", "Meters", "exposition"]

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class _Histogram:
    """Counts by upper bound; cheaper to add to than a library's, whose labels and locks are not needed here."""

    def __init__(self, bounds_s: Sequence[float] = _BOUNDS_S) -> None:
        self._bounds = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        below = 0
        told: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            told.append((bound, float(below)))
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceStatistics:
    """What the server held and did at its face. Counters only grow."""

    requests: int
    refused: int
    failed: int
    prompt_tokens: int
    sampled_tokens: int
    captured_trajectories: int
    captured_tokens: int


class Meters:
    """Counters of the face, each changed where the thing happens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.captured_trajectories = 0
        self.captured_tokens = 0
        self.connections_refused = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        self.durations: dict[str, _Histogram] = {}
        self.first_tokens = _Histogram()

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self.requests[route, status] += 1
        histogram = self.durations.get(route)
        if histogram is None:
            histogram = self.durations[route] = _Histogram()
        histogram.add(seconds)

    def first_token(self, seconds: float) -> None:
        """A generation's first tokens came."""
        self.first_tokens.add(seconds)

    def statistics(self) -> FaceStatistics:
        """The sums."""
        return FaceStatistics(
            requests=self.requests.total(),
            refused=sum(count for (_, status), count in self.requests.items() if 400 <= status < 500),
            failed=sum(count for (_, status), count in self.requests.items() if status >= 500),
            prompt_tokens=self.prompt_tokens,
            sampled_tokens=self.sampled_tokens,
            captured_trajectories=self.captured_trajectories,
            captured_tokens=self.captured_tokens,
        )


class _Snapshot(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition(
    meters: Meters, pool: PoolStatistics, *, under_way: int, sessions: int, session_tokens: int, unfinished_groups: int
) -> bytes:
    """Everything, in Prometheus' text form."""
    registry = CollectorRegistry()
    registry.register(
        _Snapshot(
            [
                *_face_metrics(meters),
                *_pool_metrics(pool),
                *_gauges(
                    {
                        "asyncrl_generations_under_way": ("Choices being generated.", under_way),
                        "asyncrl_sessions": ("Sessions held.", sessions),
                        "asyncrl_session_tokens": ("Tokens that sessions hold.", session_tokens),
                        "asyncrl_unfinished_groups": ("Groups that wait for a member's reward.", unfinished_groups),
                    }
                ),
            ]
        )
    )
    return generate_latest(registry)


def _gauges(values: dict[str, tuple[str, float]]) -> list[Metric]:
    return [GaugeMetricFamily(name, text, value=value) for name, (text, value) in values.items()]


def _face_metrics(meters: Meters) -> list[Metric]:
    requests = CounterMetricFamily("asyncrl_requests", "Requests answered.", labels=["route", "status"])
    for (route, status), count in sorted(meters.requests.items()):
        requests.add_metric([route, str(status)], count)
    durations = HistogramMetricFamily("asyncrl_request_seconds", "From request to answer.", labels=["route"])
    for route, histogram in sorted(meters.durations.items()):
        durations.add_metric([route], histogram.buckets(), histogram.total_s)
    first = HistogramMetricFamily("asyncrl_first_token_seconds", "From request to its first tokens.")
    first.add_metric([], meters.first_tokens.buckets(), meters.first_tokens.total_s)
    counters = {
        "asyncrl_prompt_tokens": ("Prompt tokens of generations.", meters.prompt_tokens),
        "asyncrl_sampled_tokens": ("Tokens that came from the pool.", meters.sampled_tokens),
        "asyncrl_captured_trajectories": ("Trajectories handed on with a reward.", meters.captured_trajectories),
        "asyncrl_captured_tokens": ("Sampled tokens in them.", meters.captured_tokens),
        "asyncrl_connections_refused": ("Connections past the limit.", meters.connections_refused),
    }
    return [
        requests,
        durations,
        first,
        *(CounterMetricFamily(name, text, value=value) for name, (text, value) in counters.items()),
    ]


def _pool_metrics(pool: PoolStatistics) -> list[Metric]:
    ended = CounterMetricFamily("asyncrl_pool_generations", "Generations by how they ended.", labels=["end"])
    for end in ("finished", "aborted", "failed", "left", "refused"):
        ended.add_metric([end], getattr(pool, end))
    serving = GaugeMetricFamily("asyncrl_replica_serving", "1 while it serves.", labels=["replica", "state"])
    version = GaugeMetricFamily("asyncrl_replica_weight_version", "It samples under.", labels=["replica"])
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
        CounterMetricFamily("asyncrl_pool_migrations", "Generations that went on elsewhere.", value=pool.migrations),
        CounterMetricFamily("asyncrl_pool_restarts", "Engines made again.", value=pool.restarts),
        *_gauges(
            {
                "asyncrl_weight_version": ("Version that the pool serves.", pool.weight_version),
                "asyncrl_pool_paused": ("1 while decoding is stopped by order.", float(pool.paused)),
                "asyncrl_pool_running": ("Generations on a replica.", pool.running),
                "asyncrl_pool_waiting": ("Generations that wait for one.", pool.waiting),
            }
        ),
    ]
