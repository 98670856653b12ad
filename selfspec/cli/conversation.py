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
from selfspec.cli.console import Interrupt
from selfspec.detokenize import DraftStreamer, StopTrimmer, TextStreamer, TokenSource, before_stop
from selfspec.messages import ChatTemplate, are_messages, encode_messages


class Conversation:
    """Asks one question after another. Each prompt is the whole conversation, but only its new part has to be read.

    options: of `SelfSpecGenerator.generate`. max_new_tokens: of an answer; fewer if the context ends before. write: gets the
    answer piece by piece, with sources if drafts are shown. copy_from: texts to copy drafts from, in addition to the
    conversation, if the policy copies. Raises ValueError if the template cannot be used.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        template: ChatTemplate,
        options: dict[str, Any],
        *,
        max_new_tokens: int,
        write: Callable[[str, TokenSource], object],
        copy_from: CopyStore | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.policy: str | None = None
        self.show_drafts = False
        self.last: GenerationResult | None = None
        self.was_interrupted = False
        self._generator, self._template, self._options = generator, template, options
        self._max_new_tokens, self._write, self._copy_from = max_new_tokens, write, copy_from
        self._encode([{"role": "user", "content": "."}])

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

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Continue with messages written by `save`. Raises ValueError for another file."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a saved conversation: {error}") from error
        if not are_messages(messages) or not all(
            isinstance(message.get(name), str) for message in messages for name in ("role", "content")
        ):
            raise ValueError(f'{path} is not a saved conversation: a list of {{"role": ..., "content": ...}}')
        self.messages = [dict(message) for message in messages]

    def ask(self, question: str) -> None:
        """Get an answer, and write it while it is generated. Ctrl-C ends it; what was generated is then the answer.

        Raises ValueError if the question cannot be asked, for example without room for an answer, and forgets it.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt, tokenizer = self._encode(asked), self._generator.tokenizer
        assert tokenizer is not None
        context = self._generator.model.max_positions
        room = context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, the model has room for {context}: begin a new one with /clear"
            )
        written: list[str] = []

        def write(text: str, source: TokenSource) -> None:
            if source != "rejected":
                written.append(text)
            self._write(text, source)

        stops = self._template.stops
        trimmer = StopTrimmer(stops, write)
        streamer = (DraftStreamer if self.show_drafts else TextStreamer)(tokenizer, trimmer.push)
        copies = copies_drafts(self._generator.resolve_policy(self.policy).observes)
        self.last, interrupt = None, Interrupt()
        try:
            with interrupt:
                self.last = self._generator.generate(
                    prompt,
                    max_new_tokens=min(self._max_new_tokens, room),
                    stop_strings=[*stops] or None,
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
        whole = None if self.last is None else self.last.text
        answer = "".join(written) if whole is None else before_stop(whole, stops)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return encode_messages(messages, self._generator.tokenizer, self._template)
