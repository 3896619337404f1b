"""HTTP requests counted by path, method and status, under the names of the common FastAPI instrumentator."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})


class HttpMetrics(Collector):
    """Lives on the event loop. Labels are few whatever is asked: routes as declared, methods that exist, 2xx to 5xx."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)

    def count(self, path: str, method: str, status: int, seconds: float) -> None:
        """A request has ended. ``path`` is a route's pattern, or ``none``."""
        method = method if method in METHODS else "other"
        self._counts[path, method, f"{status // 100}xx"] += 1
        self._seconds[path, method] += seconds

    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily("http_requests", "HTTP requests.", labels=("handler", "method", "status"))
        took = SummaryMetricFamily("http_request_duration_seconds", "Their time.", labels=("handler", "method"))
        for labels, count in self._counts.items():
            total.add_metric(labels, count)
        for (path, method), seconds in self._seconds.items():
            count = sum(n for key, n in self._counts.items() if key[:2] == (path, method))
            took.add_metric((path, method), count, seconds)
        yield total
        yield took


class Together(Collector):
    """Several collectors printed as one."""

    def __init__(self, parts: Sequence[Collector | CollectorRegistry]):
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()
