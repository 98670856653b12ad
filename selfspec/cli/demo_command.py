"""`selfspec demo`: a model answers a question, edits a text and continues code, with speculation beside plain decoding."""

from __future__ import annotations

from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from layerskip_models.checkpoints.named_models import DEMO
from selfspec.analysis.comparison import Comparison, Generate, compare, warm_up
from selfspec.cli.arguments import load_generator
from selfspec.cli.console import LogConsole
from selfspec.cli.display import PROMPT_STYLE, TextWriter, legend
from selfspec.cli.option_groups import LoadOptions
from selfspec.cli.text_input import EXAMPLE_PROMPT
from selfspec.detokenize import DraftStreamer
from selfspec.messages import encode_question, has_template

_MUSEUM = (
    "The museum opens at 9 in the morning and closes at 5 in the afternoon. Tickets cost 12 euros for adults and 6 euros for "
    "children. Guided tours start every hour in the main hall, and visitors may take photos without a flash."
)
_RECTANGLE = """\
class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):"""
TASKS = {
    "a question": "What are three tips for a good night's sleep?",
    "an edit": f"Rewrite this text with the times as AM and PM:\n\n{_MUSEUM}",
    "code": f"Complete this Python code:\n\n```python\n{_RECTANGLE}\n```",
}
"""Prompts for models that answer messages."""
BASE_TASKS = {
    "arithmetic": "Question: Tom has 3 boxes with 4 apples each. How many apples does he have?\nAnswer:",
    "translation": EXAMPLE_PROMPT,
    "code": "def read_file(path):\n    with open(path) as stream:\n        return stream.read()\n\n",
}
"""Prompts for models that only continue a text."""


def run_demo(model: str, load: LoadOptions, repeats: int, log: LogConsole) -> None:
    """Show each task's text, coloured by its drafts, then the times of `repeats` pairs of runs, as a table."""
    screen = Console(highlight=False)
    if model == DEMO:
        screen.print("The model demo is a toy of 7 M parameters. Look at the speed, not at what it says.")
        screen.print("For a real one, of 93 MB: selfspec get smollm2")
    generator = load_generator(model, load, log, prefix_cache=0)
    answers = has_template(generator.tokenizer)
    writer = TextWriter(screen)
    screen.print(legend(writer.shows_styles))
    table = Table("task", box=SIMPLE_HEAD)
    for column in ("new\ntokens", "plain,\ntokens/s", "auto,\ntokens/s", "speed-up", "same\ntext"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, prompt in (TASKS if answers else BASE_TASKS).items():
        generate: Generate = partial(
            generator.generate,
            encode_question(prompt, generator.tokenizer, raw=False),
            max_new_tokens=128 if answers else 40,  # the text of a base model has no end
            do_sample=False,
        )
        with log.status("Warming up ..."):
            warm_up(generate, 16)
        screen.print(Rule(task, style="dim"))
        screen.print(Padding(Text(prompt, PROMPT_STYLE), (0, 0, 1, 4)))
        generate(streamer=DraftStreamer(generator.tokenizer, writer.write_token))
        writer.write("\n\n")
        with log.status(f"Timing {task} ...") as status:
            found = compare(
                generate,
                repeats=repeats,
                greedy=True,
                before_run=lambda run: status.update(f"Timing {task}, run {run + 1} of {2 * repeats} ..."),  # noqa: B023
            )
        assert found is not None  # nothing interrupts it
        table.add_row(task, *_row(found))
    screen.print(table)
    screen.print(f"Numbers of the middle one of {repeats} pairs of runs; in brackets the lowest and highest speed-up.")
    screen.print(f"Next: selfspec chat {model} --show-drafts")


def _row(found: Comparison) -> list[str]:
    ours, plain = found.runs[found.middle], found.baseline_runs[found.middle]
    return [
        str(ours.num_new_tokens),
        f"{plain.tokens_per_second:.0f}",
        f"{ours.tokens_per_second:.0f}",
        f"{found.speedup:.2f} ({found.speedup_min:.2f} to {found.speedup_max:.2f})",
        "yes" if found.outputs_equal else f"NO, from token {found.first_difference} on",
    ]
