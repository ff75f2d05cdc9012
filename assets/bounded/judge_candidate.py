"""Has a built version judged by the dataset's validators before it is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.validation.candidate_version import Candidate
from dagster_adjunct.assets.validation.validators import evaluate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.bounded.build_candidate import Built


def judge(built: Built, spark: Callable[[], SparkSession]) -> Built:
    """Return a built version with what the dataset's validators say of it; nobody reads it meanwhile.

    Raises ValidatorError for a mistake in one of them; the build is kept, and the next run has it judged again.
    """
    member, version = built.member, built.version
    if version is None or built.unchanged or built.problem:
        return built
    with member.stages("validate", built.delivery.version) as validating:
        store, name, current = member.log.lake.store, member.spec.name, member.manifest.version
        verdicts = evaluate(
            member.spec.validators,
            Candidate(
                VersionReader(store, name, version),
                None if current is None else VersionReader(store, name, current),
                spark,
            ),
            member.spec.sensitive,
        )
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
