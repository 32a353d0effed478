"""What must not be shown or kept, because it is a secret or looks like one. Rather too much than too little."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?i)(^|[_.-])(api[_-]?key|access[_-]?key|private[_-]?key|keyfile[_-]?password|token|secret|password|passwd|"
    r"passphrase|credentials?|auth)([_.-]|$)"
)
_VALUE = re.compile(
    r"\b(hf|sk|ghp|gho|ghs|glpat|xoxb|github_pat|nvapi)[_-](?=\S*[A-Z\d])[A-Za-z0-9_-]{8,}|\bAKIA[0-9A-Z]{12,}|"
    r"\beyJ[A-Za-z0-9_-]{12,}|PRIVATE KEY|(?i:bearer)\s+\S{6,}|://[^/\s:@]+:[^/\s@]+@|(?i:password|passwd|secret|token|api[_-]?key)[\"']?\s*[=:]\s*\S{4,}"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable, key or flag of that name holds a secret."""
    return _NAME.search(name) is not None


def looks_secret(text: object) -> bool:
    """Whether a value has the form of a secret."""
    return _VALUE.search(str(text)) is not None
