"""What goes wrong with the hub, told apart: each kind has its own line and its own remedy."""

from __future__ import annotations

from dataclasses import dataclass

from spark_core.errors import HubError
from spark_core.settings import HubSettings, ModelSettings

AGAIN = "run up again; what has arrived is not sent again"


@dataclass(frozen=True)
class HubFault:
    """What a node or the client in the serving image met.

    Attributes:
        kind: ``unauthorized`` (401), ``gated`` (403), ``missing`` (404), ``limited`` (429), ``broken`` (any other
            status), ``offline`` (no connection), ``silent`` (no answer in time), ``cut`` (the answer broke off),
            ``garbled`` (no answer of a hub).
        found: What was found, in words.
        file: The file that was asked for; empty if it was the model as a whole.
        wait_s: Seconds that the hub asks to wait, 0 if it did not say.
    """

    kind: str
    found: str
    file: str = ""
    wait_s: int = 0


def hub_error(fault: HubFault, model: ModelSettings, hub: HubSettings, node: str, *, with_token: bool) -> HubError:
    """What a person is told of a fault.

    Args:
        node: The node that asked.
        with_token: Whether a token was shown.
    """
    name, revision = model.repository, model.hub_revision
    asked = f"{fault.file} of {name}" if fault.file else f"{name}@{revision}"
    what = f"expected {asked} from {hub.endpoint}, found: {fault.found}"
    code, do = {
        "unauthorized": (
            "hub-unauthorized",
            "the hub does not take the token: correct the secret hf_token (or hub.token_file), and the model's name"
            if with_token
            else "correct the model's name (the hub answers so for one that does not exist), or set the secret "
            "hf_token (or hub.token_file) if it is private",
        ),
        "gated": (
            "hub-gated",
            f"ask for access at {hub.endpoint}/{name} with the account of the token; then run again"
            if with_token
            else f"ask for access at {hub.endpoint}/{name}, then set the secret hf_token (or hub.token_file)",
        ),
        "missing": (
            "hub-missing",
            "correct groups.<name>.model.source: the model's name, or the revision behind the @",
        ),
        "limited": (
            "hub-limited",
            (f"wait {fault.wait_s} s, then {AGAIN}" if fault.wait_s else f"wait some minutes, then {AGAIN}")
            + ("" if with_token else "; with a token (hf_token) the hub allows more"),
        ),
        "broken": ("hub-unreachable", f"wait until the hub has mended that, then {AGAIN}"),
        "offline": (
            "hub-unreachable",
            f"see whether {node} reaches {hub.endpoint}; hub.endpoint names a mirror, and a hub cache or a directory "
            "(controller:DIR) needs no hub",
        ),
        "silent": ("hub-unreachable", f"see whether {node} reaches {hub.endpoint}, then {AGAIN}"),
        "cut": ("hub-unreachable", AGAIN),
        "garbled": ("hub-unreachable", "correct hub.endpoint: what answers there is no hub"),
    }.get(fault.kind, ("hub-unreachable", AGAIN))
    return HubError(what, code=code, where=f"{node} (model.source)", do=do)
