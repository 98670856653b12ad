"""`selfspec chat`: talk to a model in a terminal."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteriaList

from layerskip_models.checkpoints.named_models import DEMO
from layerskip_models.text_files import write_text
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore, copies_drafts
from selfspec.cli.arguments import check_sampling, load_generator, store_of_files
from selfspec.cli.commands import ChatOptions
from selfspec.cli.console import USER_ERRORS, Interrupt, LogConsole
from selfspec.cli.display import TextWriter, legend, summary_lines
from selfspec.cli.option_groups import LoadOptions
from selfspec.detokenize import DraftStreamer, StopTrimmer, TextStreamer, TokenSource, before_stop
from selfspec.messages import ChatTemplate, are_messages, encode_messages, has_template, template_of
from selfspec.options import SamplingOptions

COMMANDS = {
    "/help": "what can be typed",
    "/system [TEXT]": "show or set the system message; the whole conversation is then read again",
    "/policy [NAME]": 'show or set how to speculate: "auto", "del", "ls:3-6", "ar" (plain decoding), ...',
    "/drafts": "turn the colouring of drafts on or off",
    "/history": "show the conversation",
    "/stats": "show statistics of the last answer",
    "/save FILE": "write the conversation as JSON; selfspec chat --load FILE continues it",
    "/clear": "begin a new conversation",
    "/exit": "leave, as Ctrl-D does",
}
_QUOTES = '"""'


def run_chat(
    sampling: SamplingOptions, copy_texts: list[str], load: LoadOptions, chat: ChatOptions, log: LogConsole
) -> None:
    """Load a model, and read messages until the end of the input."""
    model = chat.model
    template = template_of(model, chat.chat_template)
    # Keep the last text on every device, so that only the new message has to be read.
    generator = load_generator(model, load, log, prefix_cache=1)
    if not has_template(generator.tokenizer, template):
        remedy = "give a Jinja file with --chat-template FILE, or --chat-template plain"
        raise ValueError(f"{model} has no chat template: {remedy}")
    check_sampling(generator.model.generation_config, sampling)
    options: dict[str, Any] = {**sampling}
    if (seed := options.pop("seed")) is not None:  # one random generator for all answers
        options["generator"] = torch.Generator(generator.model.device).manual_seed(seed)
    with log.status("Preparing to draft ..."):
        chosen = generator.resolve_policy(chat.policy)
    writer = TextWriter(Console(highlight=False))
    store, most, write = store_of_files(generator, copy_texts, chosen), chat.max_new_tokens, writer.write_token
    conversation = Conversation(generator, template, options, max_new_tokens=most, write=write, copy_from=store)
    if chat.load is not None:
        conversation.load(chat.load)
    if chat.system is not None:
        conversation.system = chat.system
    conversation.policy = chat.policy or chosen.name
    session = Chat(conversation, writer, log)
    context = generator.model.max_positions
    log.print(f"{model}, {context} tokens of context; /help lists the commands, Ctrl-C stops an answer")
    log.print(f"decoding: {conversation.decoding}")
    if model == DEMO:
        log.print("It is a toy that makes things up, and learned school arithmetic in this form:")
        log.print("Tom has 3 boxes with 4 apples each. How many apples does he have?")
    if chat.show_drafts:
        session.command("/drafts")
    if sys.stdin.isatty():
        with suppress(ImportError):  # not every system has it
            importlib.import_module("readline")  # arrow keys then edit lines, and recall earlier ones
    session.run(input if sys.stdin.isatty() else lambda prompt: input())


class Chat:
    """Reads lines and carries them out: commands, and messages to answer."""

    def __init__(self, conversation: Conversation, writer: TextWriter, log: Console) -> None:
        self._conversation, self._writer, self._log = conversation, writer, log

    def run(self, read_line: Callable[[str], str]) -> None:
        """Run until /exit or the end of the input. Ctrl-C at the prompt drops the line."""
        while True:
            try:
                line = read_line("> ").strip()
                if line.startswith(_QUOTES):
                    lines = [line.removeprefix(_QUOTES)]
                    while not lines[-1].endswith(_QUOTES):
                        lines.append(read_line("| "))
                    line = "\n".join(lines).removesuffix(_QUOTES).strip()
                if line in ("/exit", "/quit"):
                    return
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self._ask(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._log.print("\n(/exit or Ctrl-D leaves)")
            except USER_ERRORS as error:
                self._log.print(f"error: {' '.join(str(error).split())}")

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash. Raises ValueError for an unknown command."""
        name, _, text = line.partition(" ")
        text, conversation, log = text.strip(), self._conversation, self._log
        if name == "/help":
            table = Table.grid(padding=(0, 2))
            for row in COMMANDS.items():
                table.add_row(*row)
            log.print(table, soft_wrap=False)
            log.print(f"a message of several lines: {_QUOTES} before and after it")
            log.print(f"decoding: {conversation.decoding}; options of `selfspec chat` change it")
        elif name == "/system":
            if text:
                conversation.system = text
            log.print(f"system: {conversation.system or 'none'}")
        elif name == "/policy":
            if text:
                with log.status("Preparing to draft ..."):
                    conversation.use_policy(text)
            log.print(f"policy: {conversation.policy}")
        elif name == "/drafts":
            conversation.show_drafts = not conversation.show_drafts
            log.print(legend(self._writer.shows_styles) if conversation.show_drafts else "drafts are not shown")
        elif name == "/history":
            log.print("\n".join(f"{message['role']}: {message['content']}" for message in conversation.messages))
        elif name == "/stats":
            last = conversation.last
            if last is None:
                log.print("no answer yet")
            else:
                stop = "interrupted" if conversation.was_interrupted else last.stop_reason
                read = last.stats.num_prompt_tokens - last.stats.num_reused_tokens
                log.print("\n".join(summary_lines(last, stop)))
                log.print(f"prompt of {last.stats.num_prompt_tokens} tokens, {read} of them read for this answer")
        elif name == "/save":
            if not text:
                raise ValueError("say where: /save FILE")
            conversation.save(Path(text).expanduser())
            log.print(f"saved to {text}")
        elif name == "/clear":
            conversation.clear()
            log.print("a new conversation")
        else:
            raise ValueError(f"no command {name}: /help lists them")

    def _ask(self, question: str) -> None:
        try:
            self._conversation.ask(question)
        finally:
            self._writer.write("\n")
        if self._conversation.was_interrupted:
            self._log.print("(stopped; the conversation goes on)")


class Conversation:
    """Asks one question after another. Each prompt is the whole conversation, but only its new part has to be read.

    options: of `SelfSpecGenerator.generate`. max_new_tokens: of an answer; fewer if the context ends before. write: gets the
    answer piece by piece, with sources if drafts are shown. copy_from: texts to copy from besides the conversation, if the
    policy copies. Raises ValueError if the template cannot be used.
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
        encode_messages([{"role": "user", "content": "."}], generator.tokenizer, template)

    @property
    def decoding(self) -> str:
        """Say how tokens are chosen, by the options, the checkpoint's own settings, and transformers' defaults."""
        defaults, given = self._generator.model.generation_config, self._options
        values = {**defaults._get_default_generation_params(), **defaults.to_diff_dict()}
        values.update((name, value) for name, value in given.items() if value is not None)
        if not values["do_sample"]:
            return "greedy, always the likeliest token"
        named = [f"{name} {values[name]:g}" for name in ("temperature", "top_k", "top_p", "min_p") if values.get(name)]
        return f"sampling with {', '.join(named)}"

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
        names = ("role", "content")
        if not are_messages(messages) or not all(isinstance(m.get(name), str) for m in messages for name in names):
            raise ValueError(f'{path} is not a saved conversation: a list of {{"role": ..., "content": ...}}')
        self.messages = [dict(message) for message in messages]

    def ask(self, question: str) -> None:
        """Get an answer, written as it comes; Ctrl-C ends it. Raises ValueError for one without room, and forgets it."""
        asked = [*self.messages, {"role": "user", "content": question}]
        tokenizer = self._generator.tokenizer
        assert tokenizer is not None
        prompt = encode_messages(asked, tokenizer, self._template)
        context = self._generator.model.max_positions
        room = context - len(prompt)
        if room < 1:
            raise ValueError(f"{len(prompt)} tokens, and the model has room for {context}: begin a new one with /clear")
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
