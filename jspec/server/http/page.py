"""The live page, one HTML file, and the headers that let a browser run its own script and style and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """Return the page's bytes and its response headers.

    The content security policy allows only the script and the style whose hashes it holds, and requests to the page's
    own server.
    """
    raw = FILE.read_bytes()
    script, style = (_hash(raw, tag) for tag in (b"script", b"style"))
    policy = [
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return raw, headers


def _hash(raw: bytes, tag: bytes) -> str:
    """Return the hash, as a policy writes it, of the text in the page's one element with a tag."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), raw, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
