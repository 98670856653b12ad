"""The page at `/`: one file without a build step, with headers that isolate it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    """Serve the page at `/`. It calls only the API of the same server."""
    page = files("selfspec.serve").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": content_policy(page),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)


def content_policy(page: str) -> str:
    """Write the Content-Security-Policy: the page may run its own script and style, and call its own server.

    Text of a model that became HTML by mistake could neither run nor load anything.
    """
    allowed = {tag: _hashes(page, tag) for tag in ("script", "style")}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {allowed['script']}",
            f"style-src {allowed['style']}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(page: str, tag: str) -> str:
    sources = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in sources)
