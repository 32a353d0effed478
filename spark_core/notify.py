"""The file on the head that says whom its supervisor tells: a secret, so it is compared by digest and never shown."""

from __future__ import annotations

import hashlib
import json

from spark_core.errors import SettingsError
from spark_core.settings import NotifySettings
from spark_core.transport.base import Transport, run_checked, script
from spark_core.transport.ssh import write_file

FILE = "notify.json"


def notify_document(settings: NotifySettings, webhook: str | None) -> bytes:
    """The content of the file; empty if nobody is to be told.

    Raises:
        SettingsError: the webhook is no http or https address. Never holds it.
    """
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise SettingsError(["notify_webhook: expected an http or https address, found something else"])
    if webhook is None and not settings.command:
        return b""
    content = {"webhook": webhook or "", "command": list(settings.command), "deadline_s": settings.deadline_s}
    return json.dumps(content, sort_keys=True).encode() + b"\n"


def notify_digest(content: bytes) -> str:
    """What the state keeps of the file; a webhook's token cannot be guessed from it."""
    return hashlib.sha256(b"spark-vllm notify " + content).hexdigest()[:16] if content else ""


def put_notify(transport: Transport, state_folder: str, content: bytes) -> None:
    """Make the file as it should be, mode 600; it travels on standard input."""
    path = f"{state_folder}/{FILE}"
    if content:
        run_checked(transport, write_file(path, content), purpose=f"expected to write {path}")
    else:
        run_checked(transport, script('rm -f "$1"', path), purpose=f"expected to remove {path}")
