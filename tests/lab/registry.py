"""A real registry that only one emulated host can reach: Debian's docker-registry on that host's own loopback.

Docker takes plain HTTP from the loopback alone, so the other hosts could not pull from it even if they tried.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "127.0.0.1:5000"
USER, PASSWORD = "owner", "kept-on-the-node"
_FOLDER = "/var/tmp/test-registry"
# bcrypt of PASSWORD, with few rounds.
_ACCOUNTS = f"{USER}:$2b$04$yPLAG.6CzwvgKfe63tOOXehUXjdItLs2afcbUhKzHWHF6peBOgCa2\n"
_CONFIG = f"""
version: 0.1
storage: {{filesystem: {{rootdirectory: {_FOLDER}/data}}}}
http: {{addr: "{ADDRESS}"}}
auth: {{htpasswd: {{realm: test, path: {_FOLDER}/accounts}}}}
"""

OnHost = Callable[..., str]
"""Runs shell text on a host as its user, with ``stdin``; what it printed."""


class Registry:
    """The registry of a host.

    Args:
        on: Runs commands on hosts.
        host: Where it runs.
    """

    def __init__(self, on: OnHost, host: str) -> None:
        self._on, self._host = on, host
        words = [
            str(PROJECT / "toolchain" / "unpack_debian.sh"),
            "registry",
            "usr/bin/docker-registry",
            "docker-registry",
        ]
        program = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
        self._put("docker-registry", program.read_bytes())
        self._put("accounts", _ACCOUNTS.encode())
        self._put("config.yml", _CONFIG.encode())
        device = f"/dev/tcp/{ADDRESS.replace(':', '/')}"
        self._shell(
            f"cd {_FOLDER}; chmod 700 docker-registry; "
            "setsid ./docker-registry serve config.yml >log 2>&1 </dev/null & echo $! >pid; "
            f"for _ in $(seq 100); do bash -c ': <{device}' 2>/dev/null && exit 0; sleep 0.1; done; cat log; exit 1"
        )

    def login(self) -> None:
        """Give the host's daemon its credentials."""
        self._shell(f"docker login --username {USER} --password-stdin {ADDRESS} 2>&1", PASSWORD.encode())

    def logout(self) -> None:
        """Take them away again."""
        self._shell(f"docker logout {ADDRESS}")

    def push(self, image: str, name: str) -> str:
        """Put an image of the host into it under a name and take it from the host; its name by digest."""
        told = self._shell(f"docker tag {image} {ADDRESS}/{name}; docker push {ADDRESS}/{name}")
        digest = next(word for word in told.split() if word.startswith("sha256:") and len(word) == 71)
        self._shell(f"docker image rm -f {image} >/dev/null")
        return f"{ADDRESS}/{name.partition(':')[0]}@{digest}"

    def pulls(self) -> int:
        """How many manifests it has given away."""
        asked = f"grep -c '\"GET /v2/[^ ]*/manifests/[^ ]* HTTP/1.1\" 200' {_FOLDER}/log || true"
        return int(self._shell(asked))

    def close(self) -> None:
        """End it, and leave nothing of it."""
        self._shell(f"docker logout {ADDRESS} >/dev/null 2>&1; kill $(cat {_FOLDER}/pid); rm -rf {_FOLDER}")

    def _put(self, name: str, content: bytes) -> None:
        self._shell(f"mkdir -p {_FOLDER}; cat > {_FOLDER}/{name}", content)

    def _shell(self, text: str, stdin: bytes = b"") -> str:
        return self._on(self._host, text, stdin=stdin)
