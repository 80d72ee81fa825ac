"""What /metrics shows, in Prometheus' text form. Each app has a registry of its own, so two in a process don't add up."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..engine.engine import Engine, Event

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds
LATER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """Counters that the calls move, and gauges that look at ``engine`` when they are read."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "berrylm_requests",
            "HTTP calls by route and outcome: ok, refused (4xx), failed (5xx, also within a stream), left (the client did)",
            ("route", "outcome"),
            registry=registry,
        )
        self.prompt_tokens = Counter("berrylm_prompt_tokens", "Prompt tokens of all choices that began", registry=registry)
        self.cached_tokens = Counter("berrylm_cached_tokens", "Prompt tokens that the prefix cache had", registry=registry)
        self.generated_tokens = Counter("berrylm_generated_tokens", "Tokens generated", registry=registry)
        self.first = Histogram(
            "berrylm_time_to_first_token_seconds", "From admission to a choice's first token", buckets=FIRST, registry=registry
        )
        self.later = Histogram(
            "berrylm_time_per_output_token_seconds", "Between two tokens of a choice", buckets=LATER, registry=registry
        )
        scheduler, pool = engine.scheduler, engine.cache.pool
        gauges = {
            "running": ("Choices in the running batch", lambda: len(scheduler.running)),
            "waiting": ("Choices that wait for a place", lambda: len(scheduler.waiting)),
            "free_pages": ("Free KV pages", lambda: pool.pages.free_count),
            "free_slots": ("Free state slots", lambda: pool.slots.free_count),
            "free_snapshots": ("Free snapshots", lambda: pool.snapshots.free_count),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"berrylm_{name}", text, registry=registry).set_function(read)

    def token(self, event: Event, waited: float) -> None:
        """Book an event that came ``waited`` seconds after this choice's last one, or after its admission."""
        if event.made == 1:
            self.prompt_tokens.inc(len(event.request.prompt_ids))
            self.cached_tokens.inc(event.request.cached_tokens or 0)
        (self.first if event.made == 1 else self.later).observe(waited)
        self.generated_tokens.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
