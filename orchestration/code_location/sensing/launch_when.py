"""When new records are enough to launch a run: many of them, or old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LaunchWhen:
    """Launch a run as soon as so many `records` wait, or the first unread one of a partition is older than `age`.

    With both, whichever comes first; with neither, one record is enough. What is smaller than the threshold waits for
    more without limit where no `age` is given.
    """

    records: int | None = None
    age: timedelta | None = None

    def __post_init__(self) -> None:
        if self.records is not None:
            what = f"LaunchWhen has records={self.records!r}"
            check_whole_number(self.records, what, "1 or more", argument="records")
        if self.age is not None and (not isinstance(self.age, timedelta) or self.age <= timedelta(0)):
            raise ConfigurationError(
                f"LaunchWhen has age={self.age!r}: expected a timedelta of more than nothing.",
                "Write how long a record may wait: LaunchWhen(age=timedelta(minutes=10)), say.",
                argument="age",
            )

    def enough(self, lag: int) -> bool:
        """Whether so many records are enough, whatever their age."""
        least = self.records or (1 if self.age is None else None)
        return lag > 0 and least is not None and lag >= least

    def __str__(self) -> str:
        thresholds = [f"{self.records:,} records"] if self.records else []
        thresholds += [f"one older than {self.age}"] if self.age else []
        return " or ".join(thresholds) or "1 record"


def launch_rules(
    given: LaunchWhen | Mapping[str, LaunchWhen] | None, applications: tuple[str, ...]
) -> dict[str, LaunchWhen]:
    """Return the rule of each application. Raises ConfigurationError for one of an application that is not there."""
    if given is None or isinstance(given, LaunchWhen):
        return dict.fromkeys(applications, given or LaunchWhen())
    unknown = sorted(given.keys() - set(applications))
    if unknown:
        raise ConfigurationError(
            f"launch_when names {unknown[0]!r}, and the applications are {', '.join(applications)}.",
            "Correct the name.",
            argument="launch_when",
        )
    return {name: given.get(name, LaunchWhen()) for name in applications}
