"""A record as one self-contained HTML page: headline, pictures, tables, where the numbers come from."""

from __future__ import annotations

import html
from collections.abc import Sequence

from bench.record import Line
from bench.report.figures import figures, svg
from bench.report.markdown import headline, machine_sentence, readings, tables
from bench.report.table import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 88rem; margin: 0 auto; }
body { padding: 1rem; } p, h1 { max-width: 60rem; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; max-width: 60rem; }
.lead { font-size: 1.05rem; } .fine { color: #555; font-size: .85rem; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 0 2rem; }
figure { margin: 0; } figure svg { height: auto; max-width: 100%; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
tr:hover td { background: #f4f8fb; }
@media (max-width: 60rem) { td:first-child { white-space: normal; min-width: 7rem; }
  table { font-size: .75rem; } th, td { padding: .25rem .3rem; } }
""".strip()


def page(lines: Sequence[Line]) -> str:
    """The page's text; it refers to nothing outside itself."""
    title = f"selfspec-bench {lines[0]['command']}: {lines[0]['configuration']['model']}"
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="lead">{_inline(headline(lines))}</p>']
    drawn = [
        f"<section><h2>{html.escape(name)}</h2>\n"
        f'<figure role="img" aria-label="{html.escape(name)}">{svg(figure)}</figure></section>'
        for name, figure in figures(lines).items()
    ]
    parts.append('<div class="figures">\n' + "\n".join(drawn) + "\n</div>")
    parts += [_table(table) for table in [*tables(lines), *readings(lines)]]
    parts.append(f'<h2>Where the numbers come from</h2>\n<p class="fine">{_inline(machine_sentence(lines))}</p>')
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    head = row(table.columns, "th")
    return (
        f'<h2>{_inline(table.title)}</h2>\n<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def _inline(text: str) -> str:
    """The little Markdown that tables and sentences use: `code`, *italics*, **bold**."""
    escaped = html.escape(text)
    for mark, tag in (("**", "strong"), ("*", "em"), ("`", "code")):
        pieces = escaped.split(mark)
        if len(pieces) % 2:  # paired
            escaped = "".join(
                piece if number % 2 == 0 else f"<{tag}>{piece}</{tag}>" for number, piece in enumerate(pieces)
            )
    return escaped
