"""Validators as Dagster's asset checks: declared with the dataset's asset, reported by the op that evaluated them.

They run inside the dataset's cycle, before a version is published, so the checks are not
"blocking" in Dagster's sense: a version that fails is kept aside, and what is downstream goes on with the one served.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    MetadataValue,
)

from dagster_adjunct.assets.validation.validators import rule_of, thresholds_of
from dagster_adjunct.resources.errors import ValidatorError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.declaration.validator import Validator
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import Verdict, VersionRef

ACCEPTED = "adjunct_accepted"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was said of one version before it was published or refused."""

    ref: "VersionRef"
    verdicts: "Sequence[Verdict]"

    @property
    def accepted(self) -> bool:
        return self.ref.state != "rejected"


def check_specs(dataset: "AdjunctDataset", key: AssetKey) -> list[AssetCheckSpec]:
    """Return the checks of a bounded dataset: that its newest version was accepted, and one for each validator.

    A version can be refused without a validator (a marker's count is wrong, a key is null): the first check says it.
    """
    if dataset.follows_changes:
        return []
    accepted = "The newest version that was delivered is published. When it is refused, the one before stays served."
    validators = [
        AssetCheckSpec(
            validator.name,
            asset=key,
            description=f"{rule_of(validator)}: evaluated before a version is published"
            + (", which it never prevents." if validator.severity == "warn" else "; a version that fails is not."),
            metadata=_rule_metadata(validator),
        )
        for validator in dataset.validators
    ]
    return [AssetCheckSpec(ACCEPTED, asset=key, description=accepted), *validators]


def judgement_of(store: "StoredVersions", manifest: "DatasetManifest", name: str | None = None) -> Judgement | None:
    """Return what was said of the newest version that was delivered (under this name), None before the first.

    While the newest is rejected, that is what the checks show, until it is forced or dropped or a better one comes.
    Otherwise it is the version that is served, or that the name stands for.
    """
    refs = [ref for ref in manifest.listed if name is None or (ref.name == name and ref.state != "withdrawn")]
    newest = max(refs, key=lambda ref: ref.number, default=None)
    if newest is None:
        return None
    if newest.state == "rejected":
        return Judgement(newest, newest.verdicts)
    if name is None:
        served = manifest.version
        ref = manifest.ref(served.id) if served else None
        return Judgement(ref, served.verdicts) if served and ref else None
    return Judgement(newest, store.log.read_version(newest).verdicts)


def check_results(
    context: AssetExecutionContext, dataset: "AdjunctDataset", key: AssetKey, judgement: Judgement | None
) -> Iterator[AssetCheckResult]:
    """Yield the result of every check that was evaluated of this version, of those that the run has selected."""
    selected = {check.name for check in context.selected_asset_check_keys if check.asset_key == key}
    yield from (result for result in _results(dataset, key, judgement) if result.check_name in selected)


def _results(dataset: "AdjunctDataset", key: AssetKey, judgement: Judgement | None) -> Iterator[AssetCheckResult]:
    if judgement is None:
        return
    version: dict[str, Any] = {"adjunct/version": judgement.ref.id, "adjunct/name": judgement.ref.name or ""}
    yield AssetCheckResult(
        asset_key=key,
        check_name=ACCEPTED,
        passed=judgement.accepted,
        description=judgement.ref.reason or None,
        metadata=version,
    )
    declared = {validator.name: validator for validator in dataset.validators}
    for verdict in judgement.verdicts:
        if verdict.name not in declared:
            continue  # of a validator that is not declared any more
        yield AssetCheckResult(
            asset_key=key,
            check_name=verdict.name,
            passed=verdict.passed,
            severity=AssetCheckSeverity.WARN if verdict.severity == "warn" else AssetCheckSeverity.ERROR,
            description=verdict.message or None,
            metadata={
                **version,
                **_rule_metadata(declared[verdict.name]),
                "adjunct/facts": MetadataValue.json(dict(verdict.facts)),
                **_numbers(verdict.facts),
            },
        )


def _rule_metadata(validator: "Validator") -> dict[str, Any]:
    """Return a validator's rule and what it was given; whole numbers and fractions as such, so that they plot."""
    return {
        "adjunct/rule": rule_of(validator),
        "adjunct/severity": validator.severity,
        **_numbers(thresholds_of(validator)),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {f"adjunct/{name}": value for name, value in numbers.items() if not isinstance(value, bool)}


@contextmanager
def mistakes_reported(context: AssetExecutionContext, keys: Mapping[str, AssetKey]) -> Iterator[None]:
    """Report the check of a validator that can't be evaluated as failed, and let the error fail the run.

    `keys` are the assets by the names of their datasets.
    """
    try:
        yield
    except ValidatorError as error:
        key, name = keys.get(error.dataset or ""), error.validator or ""
        if key is not None and any((c.asset_key, c.name) == (key, name) for c in context.selected_asset_check_keys):
            # A result would be an output, and a step that fails has none.
            context.log_event(
                AssetCheckEvaluation(
                    asset_key=key,
                    check_name=name,
                    passed=False,
                    severity=AssetCheckSeverity.ERROR,
                    description=str(error),
                )
            )
        raise


def rejection_metadata(ref: "VersionRef", served: str | None) -> dict[str, Any]:
    """Return the metadata of the event that a version was rejected."""
    failed = [verdict.model_dump(mode="json") for verdict in ref.verdicts if not verdict.passed]
    return {
        "adjunct/action": "rejected",
        "adjunct/rejected_version": ref.id,
        "adjunct/name": ref.name or "",
        "adjunct/reason": ref.reason,
        "adjunct/served": served or "none",
        "adjunct/verdicts": MetadataValue.json(failed),
    }


def rejection_warning(dataset: str, ref: "VersionRef", served: str | None) -> str:
    """Return what an operator needs to know of a version that was rejected, and what can be done about it."""
    stays = f"version {served} stays served" if served else "there is no version to serve"
    if ref.document is None:
        return (
            f"dataset {dataset}: version {ref.name!r} ({ref.id}) is rejected, {stays}: {ref.reason}. It was not built; "
            f"deliver the content again, and forget this one with: adjunct dataset drop {dataset} {ref.id} --reason …"
        )
    look = f"adjunct dataset diff {dataset} {served} {ref.id}" if served else f"adjunct dataset items {dataset}"
    look += "" if served else f" --version {ref.id}"
    return (
        f"dataset {dataset}: version {ref.name!r} ({ref.id}) is rejected, {stays}: {ref.reason}. Look at it: {look}. "
        f"Publish it nevertheless: adjunct dataset force {dataset} {ref.id} --reason …; or forget it: "
        f"adjunct dataset drop {dataset} {ref.id} --reason …"
    )
