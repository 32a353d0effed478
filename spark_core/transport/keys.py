"""Keys of OpenSSH as text: which host key is a pin, and which private key can be used without asking anybody."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PREFERENCE = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
_MAGIC = b"openssh-key-v1\0"
_AGENT_TIMEOUT_S = 5.0


def choose_pin(lines: Sequence[str]) -> str | None:
    """The preferred host key among lines of known_hosts format: Ed25519 first, no certificates or revoked keys."""
    found: dict[str, str] = {}
    for line in lines:
        words = line.split()
        if not words or words[0].startswith(("#", "@")) or len(words) < 3:
            continue
        found.setdefault(words[1], f"{words[1]} {words[2]}")
    return next((found[kind] for kind in _PREFERENCE if kind in found), None)


def algorithms_of(pin: str) -> str:
    """ssh's ``HostKeyAlgorithms`` for a pinned key: an RSA key signs with SHA-2 only."""
    kind = pin.split(" ", 1)[0]
    return "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind


def fingerprint(key: str) -> str:
    """The SHA256 fingerprint of a public key (``type base64``), as ``ssh-keygen -l`` prints it."""
    kind, _, blob = key.partition(" ")
    try:
        raw = base64.b64decode(blob.split(" ", 1)[0], validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw:
        return f"{kind} that cannot be read"
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


@functools.cache
def agent_has_key(socket: str) -> bool:
    """Whether the agent behind a socket answers and holds at least one key; asked once in a run."""
    try:
        done = subprocess.run(
            ["env", f"SSH_AUTH_SOCK={socket}", "ssh-add", "-l"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_AGENT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def usable_private_key(text: str) -> bool:
    """Whether this is a private key without a passphrase that needs no hardware either."""
    header, _, body = text.strip().partition("\n")
    if not _is_private(header):
        return False
    if "OPENSSH" not in header:
        return "ENCRYPTED" not in header and "ENCRYPTED" not in body.partition("\n\n")[0]
    blob = _openssh_blob(body)
    # Behind the magic stands the cipher's name with its length before it.
    return blob.startswith(_MAGIC + b"\0\0\0\4none") and not _needs_hardware(blob)


def locked_private_keys(files: Sequence[str]) -> list[str]:
    """Those of the files that hold a private key which a passphrase locks."""
    found = []
    for name in files:
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        header, _, body = text.strip().partition("\n")
        blob = _openssh_blob(body)
        readable = blob.startswith(_MAGIC) and not _needs_hardware(blob) if "OPENSSH" in header else True
        if _is_private(header) and readable and not usable_private_key(text):
            found.append(name)
    return found


def _is_private(header: str) -> bool:
    return header.startswith("-----BEGIN ") and "PRIVATE KEY-----" in header


def _needs_hardware(blob: bytes) -> bool:
    return b"sk-ssh-" in blob or b"sk-ecdsa-" in blob


def _openssh_blob(body: str) -> bytes:
    try:
        return base64.b64decode("".join(body.partition("-----END")[0].split()), validate=True)
    except (binascii.Error, ValueError):
        return b""
