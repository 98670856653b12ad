"""The server's metrics, for Prometheus.

Four of them have vLLM's names, because its benchmark and others that measure acceptance at any server look for these.
Source: vLLM 0.33.0, vllm/benchmarks/serve.py and vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from selfspec.engine.results import StepOutput

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"selfspec_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"selfspec_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"selfspec_{name}", about, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Requests by route and HTTP status.", ("route", "status"))
        self.cancelled = counter("cancelled_texts", "Texts whose client left before they were complete.")
        self.failed = counter("failed_texts", "Texts that could not be completed.")
        self.waiting = gauge("waiting_texts", "Texts that wait for a place.")
        self.decoding = gauge("decoding_texts", "Texts in the engine.")
        self.round_texts = histogram("round_texts", "Texts that share a round (the batch size).", _COUNTS)
        self.cache_bytes = gauge("kv_cache_bytes", "Memory of the KV caches of the texts in the engine.")
        self.kept_bytes = gauge("kept_cache_bytes", "Memory of idle KV caches, which later texts use again.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of complete texts.")
        self.reused_tokens = counter(
            "reused_prompt_tokens", "Tokens of prompts whose keys and values were still in memory."
        )
        self.new_tokens = counter("generated_tokens", "Tokens that were generated.")
        self.drafted = counter("drafted_tokens", "Tokens that were drafted, by exit layer.", ("exit_layer",))
        self.accepted = counter("accepted_tokens", "Drafted tokens that were accepted, by exit layer.", ("exit_layer",))
        self.copied = counter("copied_tokens", "Drafts that were copied from earlier text.")
        self.copied_accepted = counter("accepted_copied_tokens", "Copied drafts that were accepted.")
        self.spec_rounds = Counter(
            "vllm:spec_decode_num_drafts", "Rounds of a text in which anything was drafted.", registry=self.registry
        )
        self.spec_drafted = Counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", registry=self.registry)
        self.spec_accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.", registry=self.registry
        )
        self.spec_accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens, by their place in the draft.",
            ("position",),
            registry=self.registry,
        )
        self.round_tokens = histogram("round_tokens", "Tokens that a round brings a text.", _COUNTS)
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request's arrival at the queue to its first token.", _SECONDS
        )
        self.between = histogram("time_between_tokens_seconds", "Mean time per token of a round.", _SECONDS)

    def progressed(self, progress: StepOutput, seconds: float, *, first: bool) -> None:
        """Count what a step brought a text.

        seconds: since the text's last tokens, or since it was submitted if these are its first.
        """
        if progress.error is not None:
            self.failed.inc()
            return
        count = len(progress.tokens)
        self.new_tokens.inc(count)
        if first:
            self.first_token.observe(seconds)
        elif count:
            self.between.observe(seconds / count)
        if progress.record is not None:
            self.round_tokens.observe(count)
            drafted, accepted = progress.record.counted_drafts
            if drafted:
                self.spec_rounds.inc()
                self.spec_drafted.inc(drafted)
                self.spec_accepted.inc(accepted)
                for place in range(accepted):
                    self.spec_accepted_at.labels(str(place)).inc()
            copied, copied_accepted = progress.record.counted_copies
            self.copied.inc(copied)
            self.copied_accepted.inc(copied_accepted)
            if progress.record.exit_layer is not None:
                layer = str(progress.record.exit_layer)
                self.drafted.labels(layer).inc(drafted - copied)
                self.accepted.labels(layer).inc(accepted - copied_accepted)
        if progress.result is not None:
            self.prompt_tokens.inc(progress.result.stats.num_prompt_tokens)
            self.reused_tokens.inc(progress.result.stats.num_reused_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
