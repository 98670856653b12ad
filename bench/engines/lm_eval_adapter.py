"""selfspec behind lm-evaluation-harness: its generation tasks run through the engine, whatever the policy.

    from bench.engines.lm_eval_adapter import SelfSpecLM
    lm_eval.simple_evaluate(model=SelfSpecLM("facebook/layerskip-llama3.2-1B", policy="auto"), tasks=["gsm8k"])

Scores are the model's own, since its output is; what can be read off is that, and how fast it went (`speed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from tqdm import tqdm

from selfspec import GenerationResult, GenerationStats, SelfSpecGenerator
from selfspec.batch import DEFAULT_BATCH_SIZE

_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "max_new_tokens"}


class SelfSpecLM(LM):
    """An `LM` of the harness that generates with one policy.

    checkpoint: hub name, folder, or a SelfSpecGenerator with a tokenizer. max_gen_toks: new tokens where a task says nothing.
    batch_size: texts that are decoded together.
    Log-likelihoods are not what this engine speeds up, and are refused: use the harness's own `hf` model for such tasks.
    """

    def __init__(
        self,
        checkpoint: str | Path | SelfSpecGenerator,
        *,
        policy: str | None = None,
        max_gen_toks: int = 256,
        batch_size: int = DEFAULT_BATCH_SIZE,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__()
        self._generator = (
            checkpoint
            if isinstance(checkpoint, SelfSpecGenerator)
            else SelfSpecGenerator.from_pretrained(checkpoint, dtype=dtype, device=device)
        )
        if self._generator.tokenizer is None:
            raise ValueError("the generator needs a tokenizer")
        self._policy = policy
        self._max_gen_toks = max_gen_toks
        self._batch_size = batch_size
        self.stats: list[GenerationStats] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every request's text, up to the first of its stop strings, which is cut off.

        Raises ValueError for an option of generation that the engine does not take.
        """
        asked: dict[str, Any] = {}  # arguments of `generate_batch`, one value for each request
        for request in requests:
            context, options = request.args
            for name, value in self._arguments(context, options).items():
                asked.setdefault(name, []).append(value)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="selfspec", disable=disable_tqdm) as bar:

            def on_result(index: int, result: GenerationResult) -> None:
                context, options = requests[index].args
                text, stops = result.text or "", _stops(options)
                ends = [text.index(stop) for stop in stops if stop in text]
                texts[index] = text[: min(ends)] if ends else text
                self.stats.append(result.stats)
                self.cache_hook.add_partial("generate_until", (context, options), texts[index])
                bar.update()

            if requests:
                prompts = asked.pop("prompt")
                options = {"policy": self._policy, "batch_size": self._batch_size, "on_result": on_result}
                self._generator.generate_batch(prompts, **asked, **options)
        return texts

    def _arguments(self, context: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of one request, for `generate`."""
        unknown = sorted(set(options) - _GENERATION)
        if unknown:
            raise ValueError(f"selfspec takes {', '.join(sorted(_GENERATION))} of generation options, not {unknown}")
        length = options.get("max_gen_toks") or options.get("max_new_tokens") or self._max_gen_toks
        do_sample = bool(options.get("do_sample", False)) and options.get("temperature", 1.0) != 0
        sampling = {name: options.get(name) if do_sample else None for name in ("temperature", "top_p", "top_k")}
        return {
            "prompt": self._tokens(context, length),
            "max_new_tokens": length,
            "do_sample": do_sample,
            "stop_strings": _stops(options) or None,
            **sampling,
        }

    def loglikelihood(self, requests: Sequence[Instance]) -> Any:
        """Refused."""
        raise NotImplementedError("selfspec speeds up generation; for log-likelihoods use the harness's hf model")

    loglikelihood_rolling = loglikelihood

    @property
    def speed(self) -> float:
        """Tokens per second over all requests so far, prefill included."""
        return sum(s.num_new_tokens for s in self.stats) / sum(s.seconds for s in self.stats)

    def _tokens(self, context: str, length: int) -> list[int]:
        """The text as token ids; of one that would not leave room its last ones, as the harness's own models do."""
        assert self._generator.tokenizer is not None
        ids: list[int] = self._generator.tokenizer(context)["input_ids"]
        return ids[-max(self._generator.model.max_positions - length, 1) :]


def _stops(options: Mapping[str, Any]) -> list[str]:
    """The stop strings of a request."""
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]
