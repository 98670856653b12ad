"""selfspec in lm-evaluation-harness: `--model selfspec`.

    lm_eval.simple_evaluate(model="selfspec", model_args={"pretrained": "MODEL", "policy": "auto"}, tasks=["gsm8k"])

Newer versions of the harness find this model by the package's entry point; for older ones, import this module. Scores do not
depend on the policy; `speed` reports how fast texts were generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401, the harness looks for its own models only while none is registered
import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from selfspec.batch import DEFAULT_BATCH_SIZE
from selfspec.engine.results import GenerationResult
from selfspec.engine.stats import GenerationStats
from selfspec.generator import SelfSpecGenerator
from selfspec.integrations.log_likelihood import continuation_scores
from selfspec.options import SamplingOptions, described
from selfspec.stop_text import before_stop

_SAMPLING = tuple(described(SamplingOptions))
_GENERATION = {"until", "max_gen_toks", "max_new_tokens", *_SAMPLING}
_Tokens = tuple[Any, list[int], list[int]]
"""The question, for the harness's cache; context and continuation as token ids."""


@register_model("selfspec")
class SelfSpecLM(TemplateLM):
    """A model of the harness that generates with one policy, and scores texts with one prefill pass.

    pretrained: hub name, folder, or a SelfSpecGenerator with a tokenizer. max_gen_toks: new tokens if the task says nothing.
    batch_size: number of texts decoded together. Values may be strings, as on the harness's command line.
    """

    def __init__(
        self,
        pretrained: str | Path | SelfSpecGenerator,
        *,
        policy: str | None = None,
        max_gen_toks: int | str = 256,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, SelfSpecGenerator):
            if device.startswith("cuda") and not torch.cuda.is_available():
                device = "cpu"  # the harness's command line says cuda:0 on every machine
            pretrained = SelfSpecGenerator.from_pretrained(pretrained, dtype=dtype, device=device)
        self._generator = pretrained
        tokenizer = pretrained.tokenizer
        if tokenizer is None:
            raise ValueError("the generator needs a tokenizer")
        if policy is not None:
            pretrained.resolve_policy(policy)  # a wrong one is an error here, not at the first task
        self.tokenizer: Any = tokenizer
        self._policy = policy
        self._max_gen_toks = int(max_gen_toks)
        self._batch_size = DEFAULT_BATCH_SIZE if batch_size == "auto" else int(batch_size)
        self.stats: list[GenerationStats] = []

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or else the one that begins it. Raises ValueError for a tokenizer with neither."""
        end, begin = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if end is None and begin is None:
            raise ValueError(
                "a text without a context is scored after the tokenizer's BOS or EOS token, and it has neither"
            )
        return begin if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """The token that comes before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int:
        return self._generator.model.max_positions

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text. A text that begins with the BOS token (from a chat template) gets no second one."""
        begin = self.tokenizer.bos_token
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, **options)["input_ids"]
        return ids

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every request's text, up to its first stop string.

        Raises ValueError for a generation option that the engine does not have.
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
                texts[index] = before_stop(result.text or "", _stops(options))
                self.stats.append(result.stats)
                self.cache_hook.add_partial("generate_until", (context, options), texts[index])
                bar.update()

            if requests:
                prompts = asked.pop("prompt")
                options = {"policy": self._policy, "batch_size": self._batch_size, "on_result": on_result}
                self._generator.generate_batch(prompts, **asked, **options)
        return texts

    def _arguments(self, context: str, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - _GENERATION)
        if unknown:
            raise ValueError(f"selfspec takes {', '.join(sorted(_GENERATION))} of generation options, not {unknown}")
        length = options.get("max_gen_toks") or options.get("max_new_tokens") or self._max_gen_toks
        do_sample = bool(options.get("do_sample", False)) and options.get("temperature", 1.0) != 0
        sampling = {name: options.get(name) if do_sample else None for name in _SAMPLING}
        return {
            # If the text leaves no room, use its last tokens, as the harness's own models do.
            "prompt": self.tok_encode(context)[-max(self.max_length - length, 1) :],
            "max_new_tokens": length,
            "stop_strings": _stops(options) or None,
            **sampling,
            "do_sample": do_sample,
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[_Tokens], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one.

        A context is read once for all continuations that share it. A context that is too long loses its first tokens.
        """
        scores: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), desc="selfspec, log-likelihoods", disable=disable_tqdm) as bar:
            for context, group in groupby(requests, key=lambda request: request[1]):
                asked = list(group)
                room = self.max_length + 1 - max(len(continuation) for _, _, continuation in asked)
                if room < 1:
                    raise ValueError(f"a continuation is longer than this model's context of {self.max_length} tokens")
                found = continuation_scores(
                    self._generator.model, context[-room:], [continuation for _, _, continuation in asked]
                )
                for (question, _, _), score in zip(asked, found):
                    if question is not None:
                        self.cache_hook.add_partial("loglikelihood", question, score)
                scores += found
                bar.update(len(asked))
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts. Each token counts once, with as much context as the model has room for."""
        totals = []
        for request in tqdm(requests, desc="selfspec, rolling", disable=disable_tqdm):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(parts, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    @property
    def speed(self) -> float:
        """Tokens per second over all texts so far, prefill included."""
        return sum(s.num_new_tokens for s in self.stats) / sum(s.seconds for s in self.stats)


def _stops(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]
