"""selfspec behind lm-evaluation-harness: its generation tasks run through the engine, whatever the policy.

    from bench.engines.lm_eval_adapter import SelfSpecLM
    lm_eval.simple_evaluate(model=SelfSpecLM("facebook/layerskip-llama3.2-1B", policy="auto"), tasks=["gsm8k"])

Scores are the model's own, since its output is; what can be read off is that, and how fast it went (`speed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from tqdm import tqdm

from selfspec import GenerationStats, SelfSpecGenerator

_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "max_new_tokens"}


class SelfSpecLM(LM):
    """An `LM` of the harness that generates with one policy, one text at a time.

    checkpoint: hub name, folder, or a SelfSpecGenerator with a tokenizer. max_gen_toks: new tokens where a task says nothing.
    Log-likelihoods are not what this engine speeds up, and are refused: use the harness's own `hf` model for such tasks.
    """

    def __init__(
        self,
        checkpoint: str | Path | SelfSpecGenerator,
        *,
        policy: str | None = None,
        max_gen_toks: int = 256,
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
        self.stats: list[GenerationStats] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every request's text, up to the first of its stop strings, which is cut off.

        Raises ValueError for an option of generation that the engine does not take.
        """
        texts = []
        for request in tqdm(requests, desc="selfspec", disable=disable_tqdm):
            context, options = request.args
            unknown = sorted(set(options) - _GENERATION)
            if unknown:
                raise ValueError(
                    f"selfspec takes {', '.join(sorted(_GENERATION))} of generation options, not {unknown}"
                )
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
            length = options.get("max_gen_toks") or options.get("max_new_tokens") or self._max_gen_toks
            do_sample = bool(options.get("do_sample", False)) and options.get("temperature", 1.0) != 0
            sampling = {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
            result = self._generator.generate(
                self._tokens(context, length),
                max_new_tokens=length,
                do_sample=do_sample,
                stop_strings=stops or None,
                policy=self._policy,
                **(sampling if do_sample else {}),
            )
            self.stats.append(result.stats)
            text = result.text or ""
            ends = [text.index(stop) for stop in stops if stop in text]
            texts.append(text[: min(ends)] if ends else text)
            self.cache_hook.add_partial("generate_until", (context, options), texts[-1])
        return texts

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
