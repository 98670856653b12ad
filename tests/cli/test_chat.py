"""`selfspec chat`: commands, answers, Ctrl-C, and where an answer ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.chat_command import COMMANDS, Chat, Conversation
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.cli.display import TextWriter
from selfspec.cli.main import app
from selfspec.detokenize import StopTrimmer, TokenSource, before_stop
from selfspec.messages import ChatTemplate
from tiny_llama import WORDS, tiny_llama, tiny_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class Talk:
    """A chat over a tiny model: what is typed goes in, what is shown comes out."""

    def __init__(self, stops: tuple[str, ...] = (), max_new_tokens: int = 20, positions: int = 512) -> None:
        model = from_transformers(tiny_llama(seed=3, max_position_embeddings=positions), layout="plain")
        self.generator = SelfSpecGenerator(model, tiny_tokenizer(), "ls:2-4", prefix_cache=1)
        self.pieces: list[tuple[str, TokenSource]] = []
        self.conversation = Conversation(
            self.generator, ChatTemplate(TEMPLATE, stops), {"do_sample": False, "eos_token_id": []},
            max_new_tokens=max_new_tokens, write=self.write,
        )  # fmt: skip
        self.conversation.use_policy("ls:2-4")
        self.log = Console(file=io.StringIO(), record=True, width=200, highlight=False, markup=False)

    def write(self, text: str, source: TokenSource) -> None:
        self.pieces.append((text, source))

    @property
    def shown(self) -> str:
        return "".join(text for text, source in self.pieces if source != "rejected")

    def type(self, *lines: str | BaseException) -> str:
        """Returns what was said beside answers."""
        read_line = Mock(side_effect=[*lines, EOFError()])
        Chat(self.conversation, TextWriter(Console(file=io.StringIO())), self.log).run(read_line)
        return self.log.export_text()

    @property
    def answers(self) -> list[str]:
        return [message["content"] for message in self.conversation.messages if message["role"] == "assistant"]


def test_a_conversation_is_one_prompt_and_what_was_read_is_kept() -> None:
    talk = Talk()
    talk.type("a bed", "cab")
    first, second = talk.answers
    fresh = SelfSpecGenerator(talk.generator.model, tiny_tokenizer())
    assert second == fresh.generate(f"a bed\n{first}\ncab\n", max_new_tokens=20, eos_token_id=[]).text
    last = talk.conversation.last
    assert last is not None and last.stats.num_reused_tokens >= len("a bed\n")
    assert talk.shown == first + second
    said = talk.type("/stats")
    assert "tokens/s" in said and "of them read for this answer" in said


def test_commands(tmp_path: Path) -> None:
    talk = Talk()
    said = talk.type("/help")
    assert all(usage in said for usage in COMMANDS) and "decoding: greedy, always the likeliest token" in said
    assert "no answer yet" in talk.type("/stats")
    talk.type("/system be", "a bed")
    assert [message["role"] for message in talk.conversation.messages] == ["system", "user", "assistant"]
    assert "system: be" in talk.type("/system")
    assert "system: fig" in talk.type("/system fig")
    assert talk.conversation.messages[0]["content"] == "fig"
    said = talk.type("/policy ar", "/policy", "/policy ls:9-1", "a")
    assert "policy: ar" in said and "exit_layer must be in" in said
    assert talk.conversation.last is not None and talk.conversation.last.policy == "ar"
    assert "no command /nonsense: /help lists them" in talk.type("/nonsense")
    file = tmp_path / "talk.json"
    assert "say where" in talk.type("/save")
    assert "user: a bed" in talk.type(f"/save {file}", "/history")
    other = Talk()
    other.conversation.load(file)
    assert other.conversation.messages == talk.conversation.messages == json.loads(file.read_text())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # like a device, it is not replaced
    assert "is not a regular file" in talk.type(f"/save {pipe}") and pipe.is_fifo()
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not a saved conversation"):
        other.conversation.load(deep)
    talk.type("/clear")
    assert talk.conversation.messages == [{"role": "system", "content": "fig"}]
    talk.type("/exit", "a bed")
    assert not talk.answers


def test_what_is_shown_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved conversation may be a stranger's, a model may write anything, and an error may quote it."""
    hostile = "a\x1b]0;title\x07 \x9b2J \x85\x7f\r\x08 [bold]b[/]"
    talk = Talk()
    file = tmp_path / "talk.json"
    file.write_text(json.dumps([{"role": role, "content": hostile} for role in ("system", hostile)]))
    talk.conversation.load(file)
    raw = io.StringIO()
    talk.log = LogConsole(file=raw, record=True, width=200, force_terminal=True)
    talk.type("/history", "/system", "/nonsense\x1b[2J")
    shown = raw.getvalue()
    assert shown.count("␛]0;title␇ \\x9b2J \\x85␡␍␈ [bold]b[/]") == 4
    assert "no command /nonsense␛[2J" in shown
    steering = [*map(chr, range(32)), "\x7f", *map(chr, range(0x80, 0xA0))]
    assert not [one for one in steering if one in shown and one not in "\t\n"]
    raw = io.StringIO()
    writer = TextWriter(Console(file=raw, force_terminal=True, color_system=None))
    writer.write_token(hostile, "target")
    assert not [one for one in steering if one in raw.getvalue()]
    with pytest.raises(typer.Exit), one_line_errors():
        raise ValueError("no model \x9b2J\x1b[31m called so")
    assert capsys.readouterr().err == "error: no model \\x9b2J␛[31m called so\n"


def test_a_message_of_several_lines_and_a_template_that_fails() -> None:
    talk = Talk()
    talk.type('"""a', 'bed"""', '"""', "fig", '"""', "", "  ")
    assert [m["content"] for m in talk.conversation.messages if m["role"] == "user"] == ["a\nbed", "fig"]
    talk.conversation._template = ChatTemplate("{{ 1 / 0 }}")
    assert talk.type("a", "/system").count("the chat template fails on these messages (ZeroDivisionError") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(times: int) -> None:
    """At the prompt it drops the line; a second one ends an answer at once."""
    talk, full = Talk(max_new_tokens=200), Talk(max_new_tokens=200)
    full.type("a bed")
    before = signal.getsignal(signal.SIGINT)  # a process in the background may ignore it

    def interrupted(text: str, source: TokenSource) -> None:
        talk.write(text, source)
        if sum(len(piece) for piece, _ in talk.pieces) > 20:
            talk.conversation._write = talk.write
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    talk.conversation._write = interrupted
    said = talk.type("a bed", KeyboardInterrupt())
    (answer,) = talk.answers
    assert 20 < len(answer) < len(full.answers[0]) and full.answers[0].startswith(answer)
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-D leaves" in said
    if times == 2:
        assert (answer, talk.conversation.last) == (talk.shown, None)
        return
    assert "stopped; the conversation goes on" in said
    talk.type("cab")
    assert len(talk.answers) == 2
    assert "interrupted" not in talk.type("/stats")


def test_a_full_conversation_says_so_and_stays_as_it_is() -> None:
    talk = Talk(max_new_tokens=500, positions=64)
    talk.type("a bed")
    last = talk.conversation.last
    assert last is not None and last.stats.num_new_tokens == 64 - len("a bed\n")
    before = [*talk.conversation.messages]
    assert "the model has room for 64: begin a new one with /clear" in talk.type("cab")
    assert talk.conversation.messages == before


def test_an_answer_ends_before_its_stop_string_and_shows_drafts_on_request() -> None:
    free = Talk(max_new_tokens=40)
    free.type("a bed")
    stop = free.answers[0][17:20]
    talk = Talk(stops=(stop,), max_new_tokens=40)
    talk.type("/drafts", "a bed")
    assert {"accepted", "rejected"} <= {source for _, source in talk.pieces}
    assert talk.answers == [free.answers[0].partition(stop)[0]] == [talk.shown]
    assert "drafts are not shown" in talk.type("/drafts")


@given(
    words=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(["accepted", "bonus", "rejected"])), max_size=30),
    stops=st.lists(st.text(alphabet="abce ", min_size=1, max_size=4), max_size=3),
)
def test_a_trimmed_stream_is_the_trimmed_text(words: list[tuple[str, TokenSource]], stops: list[str]) -> None:
    """And nothing is held back that cannot become a stop string."""
    written: list[tuple[str, TokenSource]] = []
    trimmer = StopTrimmer(stops, lambda text, source: written.append((text, source)))
    seen = ""
    for word, source in words:
        trimmer.push(word, source)
        seen += word if source != "rejected" else ""
        out = "".join(text for text, its_source in written if its_source != "rejected")
        held = before_stop(seen, stops)[len(out) :]
        assert before_stop(seen, stops).startswith(out)
        assert not held or seen != before_stop(seen, stops) or any(stop.startswith(held) for stop in stops)
    trimmer.finish()
    assert "".join(text for text, source in written if source != "rejected") == before_stop(seen, stops)


def test_what_the_command_refuses(folder: Path) -> None:
    template = "has no chat template: give a Jinja file with --chat-template FILE, or --chat-template plain"
    for arguments, told in (
        ([str(folder)], template),
        (["--temperature", "0.5"], "add --do-sample"),
        (["--policy", "ls:2-4", "--copy-from", str(folder / "config.json")], "--copy-from has no effect"),
    ):
        result = CliRunner().invoke(app, ["chat", *arguments], input="a\n")
        assert result.exit_code == 2 and told in result.stderr


def test_the_command_copies_from_files_while_its_policy_copies(tmp_path: Path) -> None:
    """The command, with the demo, from a pipe."""
    question, file = "Tom has 3 apples.", tmp_path / "answers.txt"
    asked = f"Question: {question}\nAnswer:"
    demo = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    file.write_text(asked + (demo.generate(asked, max_new_tokens=16, policy="ar").text or ""), encoding="utf-8")
    arguments = ["chat", "--max-new-tokens", "16", "--copy-from", str(file), "--policy", "copy:8"]
    typed = f"{question}\n/stats\n/clear\n/policy ls:2-4\n{question}\n/stats\n"
    result = CliRunner().invoke(app, arguments, input=typed)
    assert result.exit_code == 0, result.output
    assert "/help lists the commands" in result.stderr and "16 tokens in" in result.stderr
    first, _, second = result.stderr.partition("a new conversation")
    assert re.search(r"copied from earlier text: [1-9]", first) and "error" not in result.stderr
    assert "policy ls:2-4: " in second and "copied" not in second
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:]
