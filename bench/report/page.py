"""A record as one self-contained HTML page: headline, each table with its plots, where the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt

from bench.record import Line
from bench.report.figures import figures, svg
from bench.report.markdown import headings, headline, page_tables


def page(lines: Sequence[Line]) -> str:
    """The page's text; it refers to nothing outside itself."""
    environment = Environment(loader=PackageLoader("bench.report", "."), autoescape=True, trim_blocks=True)
    environment.filters["inline"] = MarkdownIt("commonmark", {"html": False}).renderInline
    pictures = {part: {title: svg(figure) for title, figure in drawn.items()} for part, drawn in figures(lines).items()}
    return environment.get_template("page.html.j2").render(
        title=f"selfspec-bench {lines[0]['command']}: {lines[0]['configuration']['model']}",
        headline=headline(lines),
        tables=page_tables(lines),
        headings=headings(lines),
        pictures=pictures,
    )
