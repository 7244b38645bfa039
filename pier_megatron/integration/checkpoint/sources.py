"""From which saved groups, and from which folders, a group resumes."""

import functools

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.content import RunPosition
from pier_megatron.integration.checkpoint.stored_run import StoredRun
from pier_megatron.outer.description import Description, checksum_name


class Sources:
    """Saved groups that each group of this run resumes from.

    Attributes:
        stored: Saved run.
    """

    def __init__(self, place: RunPosition, stored: StoredRun) -> None:
        """Looks from ``place`` at what is stored."""
        self._place, self.stored = place, stored
        self._there = frozenset(stored.islands)
        # Asked for once for each group.
        self._present = functools.cache(place.describe)
        self._descriptions: dict[int, Description] = {}

    def first_folder(self) -> int:
        """The folder from which Megatron loads: all ranks of an island, or of the instances, load from the same."""
        if not self.stored.islands:
            return 0
        return self.of_inner(self._description(self._nearest()), self._place.in_world.start)[0]

    def of_inner(self, saved: Description, group: int) -> list[int]:
        """Saved groups of whose inner states a group takes the mean."""
        config = self._place.config
        if self._there and self._has_groups_of(saved):
            return [group if group in self._there else 0]
        return saved.sources(group, config.groups, config.load_inner_state)

    def of_outer(self, saved: Description, group: int) -> list[int | None]:
        """The same for the outer state; None stands for that of all groups."""
        present = self._present(saved.iteration)
        if saved.has_common_outer_state or present.has_common_outer_state:
            return saved.outer_sources(group, present, self._place.config.load_inner_state)
        return list(self.of_inner(saved, group))

    def is_handed_out(self, saved: Description) -> bool:
        """Whether the first island reads the outer state that all have in common, and hands it out."""
        place = self._place
        is_common = place.config.has_common_anchor or saved.has_common_outer_state
        return bool(self.stored.islands) and place.in_world != place.in_launch and is_common

    def outer_to_read(self, saved: Description, group: int) -> list[int | None]:
        """As :meth:`of_outer`; none if it is handed out to the group."""
        return [] if self.is_handed_out(saved) and group > 0 else self.of_outer(saved, group)

    def folder_of_outer(self, source: int | None) -> int:
        """The folder with the outer state of a saved group, or with that of all."""
        if source is not None:
            return self.stored.key_of(source)
        nearest = self._nearest()
        return nearest if nearest and self._description(nearest).holds_outer_state else 0

    def is_apart(self, saved: Description, source: int) -> bool:
        """Whether the inner state of a saved group is stored beside Megatron's own."""
        return self._described(saved, source).is_apart(self.stored.number_in_folder(source))

    def checksum_of_outer(self, saved: Description, source: int | None, name: str) -> int | None:
        """The checksum of a flat buffer of a saved group, or of all; None if it is not known."""
        if source is None:
            return saved.checksums.get(checksum_name(name, None))
        number = self.stored.number_in_folder(source)
        return self._described(saved, source).checksums.get(checksum_name(name, number))

    def folders(self, saved: Description) -> list[int]:
        """The folders that the ranks which load together with this one read from."""
        return sorted(self._folders_of(saved, self._place.in_world))

    def lacking(self, saved: Description) -> list[str]:
        """The islands without a checkpoint of their own, where the saved run had as many; one phrase each."""
        stored = self.stored
        if not stored.islands or not self._has_groups_of(saved):
            return []
        missing = [group for group in self._place.in_launch if group not in self._there]
        return [
            f"there is no checkpoint of iteration {stored.iteration} of island {group}, which takes the inner state of island 0"
            for group in missing
        ]

    def check_folders(self, saved: Description) -> None:
        """Refuses a mean of islands of which some are missing.

        Raises:
            PierConfigError: On all ranks of all islands alike.
        """
        stored = self.stored
        missing = self._folders_of(saved, self._place.in_launch) - self._there if stored.islands else ()
        if missing:
            raise PierConfigError(
                f"--load {stored.root}: this run goes on with the mean of saved islands, but the "
                f"folders of the islands {sorted(missing)} hold no checkpoint of iteration {stored.iteration}. Restore "
                "them. If all islands had the same slow weights, --pier-load-inner-state first needs island 0 only."
            )

    def _has_groups_of(self, saved: Description) -> bool:
        """Whether each group takes the place of the saved one of its number: elastic islands do, however many may be there."""
        config = self._place.config
        return config.lighthouse is not None or config.groups == saved.settings["groups"]

    def _folders_of(self, saved: Description, groups: range) -> set[int]:
        inner = {self.stored.key_of(source) for group in groups for source in self.of_inner(saved, group)}
        return inner | {self.folder_of_outer(source) for group in groups for source in self.outer_to_read(saved, group)}

    def _nearest(self) -> int:
        """The folder of this island, or the first one."""
        own = self._place.in_world.start
        return own if own in self._there else 0

    def _described(self, saved: Description, source: int) -> Description:
        return self._description(source) if self.stored.islands else saved

    def _description(self, key: int) -> Description:
        if key not in self._descriptions:
            self._descriptions[key] = self.stored.description(key)
        return self._descriptions[key]
