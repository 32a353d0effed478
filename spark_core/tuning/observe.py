"""A host as far as its tuning goes, in one round trip: kernel parameters, files, the running system, the journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spark_core.errors import CommandError
from spark_core.journal import JournalEntry, Journals, Key, journals_fragment, parse_journals
from spark_core.journal.activation import Live, live_fragment, live_topics, parse_live
from spark_core.journal.file_state import FileState, complete, files_fragment, parse_files
from spark_core.packet_filter import filter_value
from spark_core.settings import Settings
from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked
from spark_core.tuning.items import ITEMS, PROJECT, ManagedFile, Place
from spark_core.tuning.sysctls import parse_sysctls, sysctls_fragment

_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Tuning:
    """The tuning of one host, as a stack declares it.

    Attributes:
        sysctls: Kernel parameters and their values.
        items: Setting to value, as :attr:`HostSettings.tuning` gives them.
        files: Files of the owner.
        disturb_others: Whether containers of others may be restarted with Docker.
        gpu: Whether containers hold a GPU, which a reload of systemd can take from them.
    """

    sysctls: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[ManagedFile] = ()
    disturb_others: bool = False
    gpu: bool = False


@dataclass(frozen=True)
class TuningFacts:
    """What the look at a host's tuning gave.

    Attributes:
        sysctls: Value of each declared parameter; None where the kernel has none of that name.
        files: State of each file that is declared or was put there by an item.
        live: The running system.
        journals: What each stack of the root holds.
    """

    sysctls: Mapping[str, str | None]
    files: Mapping[str, FileState]
    live: Live
    journals: Journals

    def held(self, stack: str) -> dict[Key, JournalEntry]:
        """What a stack's own journal holds for its host."""
        own = self.journals.get(stack, {})
        return {key: one.entry for key, one in own.items() if one.entry.part == "host"}


def tuning_of(settings: Settings) -> Tuning:
    """The declared tuning of every host.

    Raises:
        CommandError: a file of the owner is not in the project folder.
    """
    host = settings.host
    files = tuple(owner_file(file.source, file.target, file.mode, file.sudo) for file in host.files)
    return Tuning(host.parameters, items_of(settings), files, host.disturb_others, settings.hardware == "spark")


def items_of(settings: Settings) -> dict[str, str]:
    """Setting to value of what a host is to be beside its kernel parameters."""
    value = filter_value(settings)
    return settings.host.tuning | ({"packet_filter": value} if value else {})


def owner_file(source: str, target: str, mode: str, sudo: bool) -> ManagedFile:
    """A file of the owner, with its content from the project folder."""
    try:
        content = (PROJECT / source).read_bytes()
    except OSError as error:
        raise CommandError(
            f"expected the file {source} in the project folder, found: {error.strerror}", where="host.files"
        ) from None
    return ManagedFile(target, content, mode, sudo, makes_folder=True)


def paths_of(place: Place, tuning: Tuning) -> tuple[str, ...]:
    """The files that the declared tuning is about."""
    items = (path for name in tuning.items for path in ITEMS[name].paths(place))
    return (*items, *(file.path for file in tuning.files))


def tuning_fragments(place: Place, tuning: Tuning) -> tuple[Fragment, ...]:
    """The parts of an observation script; they change nothing and need no root."""
    return (
        journals_fragment(place.folder.root),
        sysctls_fragment(sorted(tuning.sysctls)),
        files_fragment(paths_of(place, tuning)),
        live_fragment(_topics(place, tuning)),
    )


def parse_tuning(transport: Transport, place: Place, tuning: Tuning, sections: Mapping[str, str]) -> TuningFacts:
    """The facts from the sections of :func:`tuning_fragments`; root tells what the deploy user cannot read."""
    node, paths = transport.node, paths_of(place, tuning)
    as_root = {file.path for name in tuning.items for file in ITEMS[name].files(place, "0") if file.sudo}
    as_root |= {file.path for file in tuning.files if file.sudo}
    files = parse_files(node, sections, paths)
    return TuningFacts(
        parse_sysctls(transport, sections, sorted(tuning.sysctls)),
        {path: complete(transport, state) if path in as_root else state for path, state in files.items()},
        parse_live(node, sections),
        parse_journals(node, sections),
    )


def observe_tuning(transport: Transport, place: Place, tuning: Tuning) -> TuningFacts:
    """Look at a host's tuning; changes nothing."""
    text = run_checked(
        transport,
        compose(*tuning_fragments(place, tuning), timeout_s=_TIMEOUT_S),
        purpose="expected to look at the host's tuning",
    )
    return parse_tuning(transport, place, tuning, parse_sections(text))


def values_of(place: Place, names: Sequence[str], facts: TuningFacts) -> dict[str, str]:
    """The value of each item as it is on the host."""
    return {name: ITEMS[name].value(place, facts.files, facts.live) for name in names}


def without_root(place: Place, tuning: Tuning, node: str, sections: Mapping[str, str]) -> TuningFacts:
    """The facts for a preview: nothing is asked as root, so that what only root can read stays untold."""
    files = parse_files(node, sections, paths_of(place, tuning))
    return TuningFacts({}, files, parse_live(node, sections), parse_journals(node, sections))


def _topics(place: Place, tuning: Tuning) -> list[str]:
    files = [ITEMS[name].files(place, "0")[-1] for name in tuning.items]
    return [topic for file in files for topic in live_topics(file.activation, file.path)]
