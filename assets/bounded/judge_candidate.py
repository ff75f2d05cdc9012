"""Has a built version judged by the dataset's validators before it is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.validation.candidate_version import Candidate
from dagster_adjunct.assets.validation.validators import evaluate
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.errors import VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.built_version import Built


def judge(built: Built) -> Built:
    """Return a built version with what the dataset's validators say of it; nobody reads it meanwhile.

    Raises ValidatorError for a mistake in one of them, and CommitConflictError where the version that it is compared
    with was discarded meanwhile; the build is kept, and the next run has it judged again.
    """
    member, version = built.member, built.version
    if version is None or built.unchanged or built.problem:
        return built
    with member.stages("validate", built.delivery.version) as validating:
        with _served(built) as current:
            new = VersionReader(member.context.lake.store, member.name, version)
            candidate = Candidate(new, current, member.context.spark)
            verdicts = evaluate(member.spec.validators, candidate, member.spec.sensitive)
        failed = [verdict for verdict in verdicts if not verdict.passed]
        wrong = [f"{verdict.name}: {verdict.message}" for verdict in failed if verdict.severity == "error"]
        odd = [f"{verdict.name}: {verdict.message}" for verdict in failed if verdict.severity == "warn"]
        validating.detail = "; ".join([*wrong, *(f"warning: {warning}" for warning in odd)])
    return replace(
        built,
        version=version.model_copy(update={"verdicts": verdicts}),
        problem="; ".join(wrong),
        warnings=tuple(f"version {built.delivery.version!r}: {warning}" for warning in odd),
    )


@contextmanager
def _served(built: Built) -> Iterator[VersionReader | None]:
    """Yield the version that is served, leased, so that no discard takes it while validators compare with it."""
    member, version = built.member, built.member.manifest.version
    if version is None or not member.spec.validators:
        yield None
        return
    lake, holder = member.context.lake, f"validation by {member.context.by}"
    try:
        lease = Lease.acquire(lake, member.name, [version.id], holder=holder)
    except VersionDiscardedError as gone:
        raise built.lost_as("discarded the version that it is compared with") from gone
    with lease:
        yield VersionReader(lake.store, member.name, version)
        lease.check()
