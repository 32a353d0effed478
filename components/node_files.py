"""Which files of ours a group needs on its nodes: the rank supervisor, and the patches of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi

from components.runtime_bundle import NodeFile, build_runtime, project_file
from spark_core.group import GroupFiles
from spark_core.settings import GroupSettings


@dataclass(frozen=True)
class FilesOfGroup:
    """The files of a group."""

    runtime: NodeFile
    patches: tuple[NodeFile, ...]

    @property
    def all(self) -> list[NodeFile]:
        """Every file once, also where two patches have the same content."""
        return list({file.remote: file for file in (self.runtime, *self.patches)}.values())

    def placed(self, weights: Mapping[str, str], in_place: Mapping[str, Mapping[str, str]] | None = None) -> GroupFiles:
        """The files together with the weights on each node.

        Args:
            weights: For each node, their folder.
            in_place: For each node that has them in a hub cache, where the content of each file lies.
        """
        patches = tuple(patch.remote for patch in self.patches)
        return GroupFiles(
            self.runtime.remote, patches, dict(weights), {n: dict(p) for n, p in (in_place or {}).items()}
        )


def files_of_group(group: GroupSettings) -> FilesOfGroup:
    """Collect the files of a group.

    Raises:
        pulumi.RunError: a patch of the settings does not exist.
    """
    patches = []
    for place, patch in enumerate(group.serving.patches):
        try:
            patches.append(project_file(patch.source))
        except OSError as error:
            raise pulumi.RunError(
                f"serving.patches[{place}].source: expected the file {patch.source} in the project folder, "
                f"found: {error.strerror}"
            ) from None
    return FilesOfGroup(build_runtime(), tuple(patches))
