"""What ssh says of a connection that failed: recorded words of OpenSSH 9.2 against a real sshd (tests/fixtures/ssh)."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.findings import KINDS
from spark_core.transport.connection import Connection, ConnectionSpec
from spark_core.transport.login_errors import login_failure, login_timeout, offered_fingerprint

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "ssh"
CASES = sorted(path.stem for path in FOLDER.glob("*.log"))
PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
LAB_KEY = "SHA256:Mz/Le4ztyjMUdoTHdLGwIJi8HDL27+aXuSXkcII/HXE"
HEAD = Connection(ConnectionSpec("spark-a", "10.1.230.180", "spark"), "10.1.230.180", "spark", 22, PIN, None, None, ())
DIRECT = replace(HEAD, spec=ConnectionSpec("spark-b", "10.1.230.181", "spark"), host_name="10.1.230.181")


def connection(case: str) -> Connection:
    return replace(DIRECT, via=HEAD) if case.startswith("way-") else DIRECT


def said(case: str) -> tuple[str, str]:
    """(log, standard error) of a recorded case."""
    aside = FOLDER / f"{case}.aside"
    return (FOLDER / f"{case}.log").read_text(), aside.read_text() if aside.exists() else ""


EXPECTED: dict[str, tuple[str, str, str, str]] = {
    "refused": ("connect (TCP)", "connect-failed", "boot", "found: connection refused"),
    "no-answer": ("connect (TCP)", "connect-failed", "boot", "found: no answer in 8 s"),
    "no-route": ("connect (TCP)", "connect-failed", "boot", "found: no route to host"),
    "unknown-name": ("connect (TCP)", "connect-failed", "never", "found: the name cannot be resolved"),
    "other-host-key": ("host key (nodes[].host_key)", "host-key-mismatch", "never", "Host key verification failed."),
    "other-kind-of-host-key": (
        "host key (nodes[].host_key)",
        "host-key-mismatch",
        "never",
        "no matching host key type",
    ),
    "dropped": ("key exchange", "key-exchange-failed", "busy", "Connection closed by remote host"),
    "silent-sshd": ("key exchange", "key-exchange-failed", "boot", "Connection timed out during banner exchange"),
    "denied": ("authentication", "authentication-failed", "never", "Permission denied (publickey,password)."),
    "denied-behind-a-banner": ("authentication", "authentication-failed", "never", "Permission denied (publickey"),
    "denied-known-key-locked": ("authentication", "authentication-failed", "never", "no ssh-agent answers"),
    "denied-locked-pem": ("authentication", "authentication-failed", "never", "offered: no key (no ssh-agent answers)"),
    "denied-no-key": ("authentication", "authentication-failed", "never", "offered: no key (no ssh-agent answers)"),
    "denied-empty-agent": ("authentication", "authentication-failed", "never", "the ssh-agent holds no key"),
    "too-many-keys": ("authentication", "authentication-failed", "never", "Too many authentication failures"),
    "booting": ("session", "session-refused", "boot", "found: System is booting up. Unprivileged users are not"),
    "way-refused": ("connect (TCP)", "connect-failed", "boot", "found: connection refused"),
    "way-no-route": ("connect (TCP)", "connect-failed", "boot", "found: no route to host"),
    "way-forbidden": ("connect (TCP)", "connect-failed", "never", "administratively prohibited: open failed"),
    "way-forbidden-over-master": ("connect (TCP)", "connect-failed", "boot", "Stdio forwarding request failed"),
    "way-head-refused": ("connect (TCP) of spark-a", "connect-failed", "boot", "port 29: Connection refused"),
    "way-head-denied": (
        "authentication of spark-a",
        "authentication-failed",
        "never",
        "aurora@10.1.230.180: Per",
    ),
    "way-head-other-key": ("host key of spark-a", "host-key-mismatch", "never", "Host key verification failed."),
}


def test_every_recorded_case_is_expected() -> None:
    assert set(EXPECTED) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_step_that_failed_and_ssh_s_own_words(case: str) -> None:
    failure = login_failure(connection(case), *said(case))
    step, code, passing, words = EXPECTED[case]
    assert (failure.error.step, failure.error.code, failure.passing) == (step, code, passing)
    assert words in failure.error.line
    assert failure.error.node == "spark-b"
    assert failure.error.code in KINDS
    assert "Authorised use only" not in str(failure.error)


def test_only_the_node_on_the_way_can_tell_why_a_forwarded_connection_failed() -> None:
    unclear = {case for case in CASES if login_failure(connection(case), *said(case)).unclear}
    assert unclear == {"way-forbidden-over-master", "way-head-refused", "way-head-denied", "way-head-other-key"}


def test_the_keys_that_were_offered_are_told_by_their_fingerprints() -> None:
    error = login_failure(DIRECT, *said("denied")).error
    assert f"offered: {LAB_KEY} (/home/aurora/.ssh/id_ed25519, from the agent) (keys in the ssh-agent: 1)" in error.line
    assert error.do == ("install a key for spark on the node (ssh-copy-id spark@10.1.230.181), or correct nodes[].user")


def test_a_key_that_the_node_knows_and_a_passphrase_locks_needs_an_agent() -> None:
    error = login_failure(DIRECT, *said("denied-known-key-locked")).error
    assert error.do == (
        f"the node knows {LAB_KEY}, and a passphrase locks /home/aurora/.ssh/id_ed25519: this key needs an ssh-agent: "
        "ssh-add /home/aurora/.ssh/id_ed25519"
    )


def test_a_key_of_the_agent_that_the_node_knows_was_not_signed_with() -> None:
    log, aside = said("denied-known-key-locked")
    error = login_failure(DIRECT, log.replace(" explicit", " explicit agent"), aside).error
    assert error.do.startswith(f"the node knows {LAB_KEY}, and the agent that holds it did not sign")


def test_a_locked_key_that_could_not_even_be_offered_is_named(tmp_path: Path) -> None:
    locked = tmp_path / "id_rsa"
    words = ["-t", "rsa", "-m", "PEM", "-N", "passphrase", "-f", str(locked)]
    subprocess.run(["ssh-keygen", "-q", *words], check=True, timeout=60)
    error = login_failure(replace(DIRECT, identity_files=(str(locked),)), *said("denied-locked-pem")).error
    assert error.do.startswith(f"a passphrase locks {locked}: such a key needs an ssh-agent: ssh-add {locked}; or")


def test_without_any_key_a_person_learns_to_make_one() -> None:
    error = login_failure(DIRECT, *said("denied-no-key")).error
    assert error.line.startswith("spark-b, authentication: expected a login as spark without a prompt, found: spark@")
    assert error.do.startswith("start an ssh-agent that holds a key, or make a key (ssh-keygen); then install")


def test_of_many_keys_the_first_are_told_and_what_limits_them() -> None:
    error = login_failure(DIRECT, *said("too-many-keys")).error
    assert error.line.count("SHA256:") == 4
    assert "and 2 more (keys in the ssh-agent: 8)" in error.line
    assert "IdentitiesOnly" in error.do


def test_sshd_says_itself_that_it_has_too_many_logins() -> None:
    assert login_failure(DIRECT, *said("dropped")).error.evidence == ("Exceeded MaxStartups",)


def test_the_fingerprint_that_the_other_end_showed_is_in_the_log() -> None:
    shown = offered_fingerprint(said("other-host-key")[0])
    assert shown is not None
    assert shown.startswith("ssh-ed25519 SHA256:")
    assert offered_fingerprint(said("refused")[0]) is None


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("silent-sshd", "key-exchange-failed", "sshd accepts connections but does not answer"),
        ("booting", "session-refused", "sshd exchanged keys and then did not answer"),
    ],
)
def test_a_login_without_an_end_is_told_by_how_far_it_came(case: str, code: str, words: str) -> None:
    failure = login_timeout(DIRECT, said(case)[0], 15)
    assert (failure.error.code, failure.passing) == (code, "boot")
    assert words in failure.error.line


@given(case=st.sampled_from(CASES), share=st.floats(0, 1), cut_aside=st.booleans())
def test_words_that_are_cut_anywhere_still_give_one_line_and_a_kind(case: str, share: float, cut_aside: bool) -> None:
    log, aside = said(case)
    failure = login_failure(connection(case), log[: int(len(log) * share)], "" if cut_aside else aside)
    assert failure.error.code in KINDS
    assert "\n" not in failure.error.line


@given(log=st.text(max_size=200), aside=st.text(max_size=200), way=st.booleans())
def test_words_that_nobody_expects_still_give_one_line_and_a_kind(log: str, aside: str, way: bool) -> None:
    failure = login_failure(connection("way-" if way else ""), log, aside)
    assert failure.error.code in KINDS
    assert failure.error.line.splitlines() == [failure.error.line]
