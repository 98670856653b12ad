"""Speed over the length of the context: what a long text costs compared with reading its keys and values.

A prompt is read once per context, timed; what decoding costs there is then measured with every policy on the same cache,
which its generator keeps between calls (`prefix_cache`): all but the last rows of the prompt are not read again. The next
turn of a conversation is timed in the same way: the text so far, and a message after it. Contexts take turns, so that slow
drift of the machine meets all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.datasets import EncodedPrompt, load_prompts
from bench.engines.own import GREEDY, run_afresh
from bench.engines.peers import FirstToken, transformers_sequences
from bench.machine.roofline import best_fixed
from bench.measure import in_turn
from bench.record import Line
from layerskip_models import LayerSkipModel
from policies import CostModel
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import synchronize

CONTEXTS = (128, 1024, 4096, 16384)
"""Tokens of the prompt."""
MESSAGE_TOKENS = 32
"""Tokens that the next turn of a conversation adds."""


def long_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> EncodedPrompt:
    """Put the shipped prompts one after another, repeated as often as needed, and cut them to `num_tokens` tokens."""
    text = "\n\n".join(prompt.prompt for prompt in load_prompts())
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    repeated = ids.repeat(-(-num_tokens // ids.numel()))[:num_tokens]
    return EncodedPrompt(id=f"context-{num_tokens}", task="context", ids=repeated)


class Context:
    """One context, read into a cache of its own, and what decodes after it.

    cost: ranks the fixed settings.
    """

    def __init__(self, model: LayerSkipModel, prompt: EncodedPrompt, *, max_new_tokens: int, cost: CostModel) -> None:
        self._generator = SelfSpecGenerator(model, prefix_cache=1)  # the last text, on every device
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._size = prompt.ids.numel()
        first = self._generator.generate(prompt.ids, max_new_tokens=max_new_tokens, policy="ar", **GREEDY)
        self._tokens = first.new_tokens
        seconds = first.stats.time_to_first_token
        self.prefill: Line = {"kind": "prefill", "context": self._size, "time_to_first_token": seconds}
        self._policies = ["ar", best_fixed(self._generator, prompt, max_new_tokens, cost), "auto"]
        for policy in self._policies:
            _decode(self._generator, policy, prompt, max_new_tokens)

    def decode(self, repeat: int, write: Callable[[Line], None], advance: Callable[[str], None]) -> None:
        """Plain decoding, the fixed setting that is best here by replay, and auto, each repeat from another one on.

        Writes a "decode" line for each.
        """
        for policy in in_turn(self._policies, repeat):
            line = _decode(self._generator, policy, self._prompt, self._max_new_tokens)
            equal = line.pop("new_tokens") == self._tokens
            write({**line, "repeat": repeat, "outputs_equal": equal, "role": _role(policy)})
            advance(policy)

    def turn(self, repeat: int) -> Line | None:
        """Time to the first token of a conversation's next turn: prompt, answer and a message, where only the message is new.

        The policy is `auto`, which has up to 32 rows of the prompt's end read again, to learn from them. None if too few
        positions are left.
        """
        message = self._prompt.ids[:MESSAGE_TOKENS]
        conversation = torch.cat([self._prompt.ids, torch.tensor(self._tokens), message])
        new = 1 + repeat  # one more each time: what is kept is copied into a longer cache, as in a real conversation
        if conversation.numel() + new > self._generator.model.max_positions:
            return None
        _decode(self._generator, "auto", self._prompt, self._max_new_tokens)  # the turn before: this is kept now
        stats = self._generator.generate(conversation, max_new_tokens=new, policy="auto", **GREEDY).stats
        return {
            "kind": "turn",
            "context": self._size,
            "repeat": repeat,
            "prompt_tokens": stats.num_prompt_tokens,
            "reused_tokens": stats.num_reused_tokens,
            "time_to_first_token": stats.time_to_first_token,
        }


def _role(policy: str) -> str:
    return "best fixed" if policy.startswith("ls:") else {"ar": "plain"}.get(policy, policy)


def _decode(generator: SelfSpecGenerator, policy: str, prompt: EncodedPrompt, max_new_tokens: int) -> Line:
    result = run_afresh(generator, policy, prompt.ids, max_new_tokens)
    stats = result.stats
    return {
        "kind": "decode",
        "context": prompt.ids.numel(),
        "policy": policy,
        "tokens": stats.num_new_tokens - 1,
        "seconds": stats.seconds - stats.time_to_first_token,
        "etpl": stats.etpl,
        "new_tokens": result.new_tokens,
    }


def measure_transformers(network: PreTrainedModel, prompt: EncodedPrompt, max_new_tokens: int) -> Line:
    """Time transformers' own `generate` on the same prompt: to the first token, and decoding after it, in one call."""
    first: list[float] = []

    def clock() -> None:
        synchronize(network.device)
        first.append(perf_counter())

    ids = prompt.ids.to(network.device).unsqueeze(0)
    synchronize(network.device)
    start = perf_counter()
    transformers_sequences(network, ids, max_new_tokens, streamer=FirstToken(clock))
    synchronize(network.device)
    end = perf_counter()
    return {
        "kind": "transformers",
        "context": prompt.ids.numel(),
        "tokens": max_new_tokens - 1,
        "seconds": end - first[0],
        "time_to_first_token": first[0] - start,
    }


def usable_contexts(contexts: Sequence[int], max_new_tokens: int, max_positions: int) -> list[int]:
    """Those that leave room for the new tokens. Raises ValueError where none does."""
    usable = sorted({context for context in contexts if context + max_new_tokens <= max_positions})
    if not usable:
        raise ValueError(
            f"the model has {max_positions} positions: no context of {', '.join(map(str, contexts))} leaves room for "
            f"{max_new_tokens} new tokens"
        )
    return usable
