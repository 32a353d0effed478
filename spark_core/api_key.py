"""The API key of a group: made once, kept in the encrypted state, and as a file of mode 600 on the head.

vLLM never gets it: the supervisor's middleware reads the file, so that the key is in no argument list, environment,
label or log.
"""

from __future__ import annotations

import hashlib
import secrets

from spark_core.errors import CommandError
from spark_core.transport.base import Transport, command, run_checked, script
from spark_core.transport.ssh import write_file


def generate_key() -> str:
    """A new key with 256 bits of randomness, in OpenAI's shape."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """SHA-256 of a key file's content; safe to show and to compare."""
    return hashlib.sha256(f"{key}\n".encode()).hexdigest()


def write_key(transport: Transport, path: str, key: str) -> None:
    """Put the key file on a node, mode 600, by one rename; the key travels on standard input."""
    run_checked(transport, write_file(path, f"{key}\n".encode()), purpose=f"expected to write the key file {path}")
    if observe_key(transport, path) != key_digest(key):
        raise CommandError(f"expected the key just written in {path}, found something else", where=transport.node)


def observe_key(transport: Transport, path: str) -> str:
    """Digest of the key file with its mode if that is not 600; ``absent`` if there is none."""
    text = run_checked(
        transport,
        script(
            '[ -e "$1" ] || { echo absent; exit 0; }; mode=$(stat -c %a "$1"); sum=$(sha256sum "$1" | cut -c1-64); '
            '[ "$mode" = 600 ] && echo "$sum" || echo "$sum mode $mode"',
            path,
        ),
        purpose=f"expected to read the key file {path}",
    )
    return text.strip()


def read_key(transport: Transport, path: str) -> str:
    """The key itself, for a request of ours; never printed."""
    return run_checked(transport, command("cat", path), purpose=f"expected to read the key file {path}").strip()


def remove_key(transport: Transport, path: str) -> None:
    """Take the key file away; none is fine."""
    run_checked(transport, command("rm", "-f", "--", path), purpose=f"expected to remove the key file {path}")
