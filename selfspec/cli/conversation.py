"""A conversation with a model: its messages, how the next answer is generated, and the last result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import StoppingCriteriaList

from layerskip_models.text_files import write_text
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore, copies_drafts
from selfspec.cli.interrupt import InterruptCriteria
from selfspec.messages import ChatTemplate, are_messages, encode_messages
from selfspec.stop_text import StopTrimmer, before_stop
from selfspec.streaming import DraftStreamer, Fate, TextStreamer


class Conversation:
    """Asks one question after another. Each prompt is the whole conversation, but only its new part has to be read.

    options: of `SelfSpecGenerator.generate`. max_new_tokens: of an answer; fewer if the context ends before. write: gets the
    answer piece by piece, with fates if drafts are shown. copy_from: texts to copy drafts from, in addition to the
    conversation, if the policy copies.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        template: ChatTemplate,
        options: dict[str, Any],
        *,
        max_new_tokens: int,
        write: Callable[[str, Fate], object],
        copy_from: CopyStore | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.policy: str | None = None
        self.show_drafts = False
        self.last: GenerationResult | None = None
        self.was_interrupted = False
        self._generator, self._template, self._options = generator, template, options
        self._max_new_tokens, self._write = max_new_tokens, write
        self._copy_from = copy_from

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([] if text is None else [{"role": "system", "content": text}]), *rest]

    def clear(self) -> None:
        """Start a new conversation with the same system message."""
        self.messages = [] if self.system is None else self.messages[:1]
        self.last = None

    def use_policy(self, name: str) -> None:
        """Use a policy from the next answer on. Raises ValueError for an unknown one."""
        self._generator.resolve_policy(name)
        self.policy = name

    def check(self) -> None:
        """Raise ValueError if there is no chat template."""
        self._encode([{"role": "user", "content": "."}])

    def ask(self, question: str) -> None:
        """Get an answer, and write it while it is generated. Ctrl-C ends it; what was generated is then the answer.

        Raises ValueError if the question cannot be asked, for example without room for an answer, and forgets it.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = self._answer(self._encode(asked))
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Continue with messages written by `save`. Raises ValueError for another file."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a saved conversation: {error}") from error
        texts = are_messages(messages) and all(
            isinstance(message.get("role"), str) and isinstance(message.get("content"), str) for message in messages
        )
        if not texts:
            raise ValueError(f'{path} is not a saved conversation: a list of {{"role": ..., "content": ...}}')
        self.messages = [dict(message) for message in messages]

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return encode_messages(messages, self._generator.tokenizer, self._template)

    def _answer(self, prompt: list[int]) -> str:
        tokenizer, context = self._generator.tokenizer, self._generator.model.max_positions
        assert tokenizer is not None
        room = context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, the model has room for {context}: begin a new one with /clear"
            )
        written: list[str] = []

        def write(text: str, fate: Fate) -> None:
            if fate != "rejected":
                written.append(text)
            self._write(text, fate)

        trimmer = StopTrimmer(self._template.stops, write)
        streamer = (DraftStreamer if self.show_drafts else TextStreamer)(tokenizer, trimmer.push)
        copies = copies_drafts(self._generator.resolve_policy(self.policy).observes)
        self.last, interrupt = None, InterruptCriteria()
        try:
            with interrupt:
                self.last = self._generator.generate(
                    prompt,
                    max_new_tokens=min(self._max_new_tokens, room),
                    stop_strings=[*self._template.stops] or None,
                    policy=self.policy,
                    copy_from=self._copy_from if copies else None,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([interrupt]),
                    **self._options,
                )
        except KeyboardInterrupt:  # pressed again, or before the first token
            interrupt.requested = True
        trimmer.finish()
        self.was_interrupted = interrupt.requested
        if self.last is None or self.last.text is None:
            return "".join(written)
        return before_stop(self.last.text, self._template.stops)
