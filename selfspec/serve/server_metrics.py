"""The server's metrics, for Prometheus.

Four of them have vLLM's names, because its benchmark and others that measure acceptance at any server look for these.
Source: vLLM 0.33.0, vllm/benchmarks/serve.py and vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from selfspec.engine.results import StepOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class ServerMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str, vllm: bool = False) -> Counter:
            prefix = "vllm:spec_decode_num_" if vllm else "selfspec_"
            return Counter(prefix + name, about, labels, registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"selfspec_{name}", about, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"selfspec_{name}", about, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by route and HTTP status.", "route", "status")
        self.cancelled = counter("cancelled_texts", "Texts whose client left before they were complete.")
        self.failed = counter("failed_texts", "Texts that could not be completed.")
        self.waiting = gauge("waiting_texts", "Texts that wait for a place.")
        self.decoding = gauge("decoding_texts", "Texts in the engine.")
        self.round_texts = histogram("round_texts", "Texts that share a round (the batch size).", _COUNTS)
        self.cache_bytes = gauge("kv_cache_bytes", "Memory of the KV caches of the texts in the engine.")
        self.kept_bytes = gauge("kept_cache_bytes", "Memory of idle KV caches, which later texts use again.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of complete texts.")
        self.reused_tokens = counter("reused_prompt_tokens", "Tokens of prompts whose keys and values were in memory.")
        self.new_tokens = counter("generated_tokens", "Tokens that were generated.")
        self.drafted = counter("drafted_tokens", "Tokens that were drafted, by exit layer.", "exit_layer")
        self.accepted = counter("accepted_tokens", "Drafted tokens that were accepted, by exit layer.", "exit_layer")
        self.copied = counter("copied_tokens", "Drafts that were copied from earlier text.")
        self.copied_accepted = counter("accepted_copied_tokens", "Copied drafts that were accepted.")
        self.spec_rounds = counter("drafts", "Rounds of a text in which anything was drafted.", vllm=True)
        self.spec_drafted = counter("draft_tokens", "Drafted tokens.", vllm=True)
        self.spec_accepted = counter("accepted_tokens", "Accepted drafted tokens.", vllm=True)
        by_place = "Accepted drafted tokens, by their place in the draft."
        self.spec_accepted_at = counter("accepted_tokens_per_pos", by_place, "position", vllm=True)
        self.round_tokens = histogram("round_tokens", "Tokens that a round brings a text.", _COUNTS)
        to_first = "From the request's arrival at the queue to its first token."
        self.first_token = histogram("time_to_first_token_seconds", to_first, _SECONDS)
        self.between = histogram("time_between_tokens_seconds", "Mean time per token of a round.", _SECONDS)

    def progressed(self, output: StepOutput, seconds: float, *, first: bool) -> None:
        """Count what a step brought a text. seconds: since its last tokens, or since it was submitted."""
        if output.error is not None:
            self.failed.inc()
            return
        count = len(output.tokens)
        self.new_tokens.inc(count)
        if first:
            self.first_token.observe(seconds)
        elif count:
            self.between.observe(seconds / count)
        if output.record is not None:
            self.round_tokens.observe(count)
            drafted, accepted = output.record.counted_drafts
            if drafted:
                self.spec_rounds.inc()
                self.spec_drafted.inc(drafted)
                self.spec_accepted.inc(accepted)
                for place in range(accepted):
                    self.spec_accepted_at.labels(str(place)).inc()
            copied, copied_accepted = output.record.counted_copies
            self.copied.inc(copied)
            self.copied_accepted.inc(copied_accepted)
            if output.record.exit_layer is not None:
                layer = str(output.record.exit_layer)
                self.drafted.labels(layer).inc(drafted - copied)
                self.accepted.labels(layer).inc(accepted - copied_accepted)
        if output.result is not None:
            self.prompt_tokens.inc(output.result.stats.num_prompt_tokens)
            self.reused_tokens.inc(output.result.stats.num_reused_tokens)
