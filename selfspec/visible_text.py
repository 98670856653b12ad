"""Untrusted text for a terminal: control characters become visible."""

from __future__ import annotations

_PICTURES = 0x2400  # Unicode's pictures of the first 32 control characters
_VISIBLE: dict[int, int | str] = {
    **{code: _PICTURES + code for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},  # U+009B alone acts like ESC [
    0x7F: 0x2421,
}
_VISIBLE_LINE = {**_VISIBLE, ord("\n"): "\u23ce", ord("\t"): "\u21e5"}


def visible(text: str) -> str:
    """The text with visible control characters, except tab and newline."""
    return text.translate(_VISIBLE)


def visible_line(text: str) -> str:
    """The same on one line: tab and newline become visible too."""
    return text.translate(_VISIBLE_LINE)
