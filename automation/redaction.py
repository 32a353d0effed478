"""Takes secrets out of text before anybody sees it: by value where one is known, by form everywhere."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable

REPLACEMENT = "[redacted]"
_FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"\b(?:hf|sk|ghp|gho|github_pat)[_-][A-Za-z0-9_-]{12,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(
        r"(?i)(?<![\w/.-])((?:\w*(?:password|passphrase|secret|token|api[_-]?key))[\"']?\s*[=:]\s*\[?[\"']?)[^\s\"',;}\]]{4,}"
    ),
    re.compile(r"(?<=\bv1:)[A-Za-z0-9+/=]{8,}:[A-Za-z0-9+/=:]{8,}"),
)
_known: set[str] = set()


def learn(secrets: Iterable[str | None]) -> None:
    """Take these values out from now on, also as JSON and HTML write them; what is too short to be one is left."""
    for secret in secrets:
        if secret and len(secret) >= 6:
            _known.update((secret, json.dumps(secret)[1:-1], html.escape(secret)))


def redacted(text: str) -> str:
    """The text without secrets."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, REPLACEMENT)
    for form in _FORMS:
        text = form.sub(lambda match: (match.group(1) if match.lastindex else "") + REPLACEMENT, text)
    return text
