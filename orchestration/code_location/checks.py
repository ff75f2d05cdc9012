"""Asset checks: validators of datasets, bootstraps, match rates of joins, and watermark lags of
inputs.

Validators run before a version is published, so their checks are not "blocking" in Dagster's sense:
a version that fails is rejected, and downstream assets use the served one. The check `bootstrapped`
is blocking: if it fails as an error, nothing downstream runs.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.policies import Validator
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.progress import BootstrapProgress, bootstrap_progress
from dagster_adjunct.assets.validation.validators import describe_rule, validator_arguments
from dagster_adjunct.assets.versions.manifest import DatasetManifest, Decision, as_unbounded
from dagster_adjunct.assets.versions.reports import AdvanceReport, StageEvent
from dagster_adjunct.assets.versions.version import Verdict, VersionRef
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.application.lineage import find_first_outputs
from dagster_adjunct.orchestration.maintenance.followers import list_lagging_followers
from dagster_adjunct.orchestration.operators.lookups import RESTATED
from dagster_adjunct.orchestration.operators.operator import Expectation
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.operators.waiting import LATE_CHANGES
from dagster_adjunct.resources.errors import (
    AdjunctError,
    BadChangeError,
    ConfigurationError,
    ExpectationError,
    RestatementError,
    ValidatorError,
)
from dagster_adjunct.resources.file_streams.overview import is_of_files, list_files
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.progress import InputTimes, StepEvent

# For log handlers outside of Dagster: each record carries the event as `adjunct_event`.
_log = logging.getLogger("adjunct.run")
_SHOWN_FILES = 10


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of an asset's op, with the lake and the stream systems that it reads."""

    context: dg.AssetExecutionContext
    lake: Lake
    systems: Mapping[str, StreamSystem]

    def log_event(self, event: "StageEvent | StepEvent") -> None:
        """Log an event in the run and in Python's log."""
        self.context.log.info(event.summary())
        _log.info(event.summary(), extra={"adjunct_event": event})


_SHORTEST_WINDOW = timedelta(minutes=1)


def freshness_policy(app: Application, node: LineageNode) -> dg.FreshnessPolicy | None:
    """Return a policy that fails if a dataset was not checked for changes within its `freshness`;
    None without one.

    Raises ConfigurationError for a time shorter than Dagster allows.
    """
    if node.kind != "dataset":
        return None
    window = app.dataset(node.name).presentation.freshness
    if window is None:
        return None
    if window < _SHORTEST_WINDOW:
        raise ConfigurationError(
            f"dataset {node.name!r} declares freshness={window}, but Dagster's shortest window is"
            f" {_SHORTEST_WINDOW}.",
            "Declare a longer window, or use max_staleness= of app.table(…), which takes any.",
            argument="freshness",
            dataset=node.name,
        )
    return dg.FreshnessPolicy.time_window(fail_window=window)


BOOTSTRAPPED = "bootstrapped"


def bootstrap_check_specs(dataset: AdjunctDataset, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return the check `bootstrapped` of an unbounded dataset with bootstrap=True, else an empty
    list.
    """
    if not dataset.follows_changes or not dataset.bootstrap:
        return []
    text = (
        "The table has read its stream up to the ends at the start of its bootstrap; downstream"
        " assets wait for it."
    )
    return [dg.AssetCheckSpec(BOOTSTRAPPED, asset=key, description=text, blocking=True)]


def bootstrap_check_results(
    run: OpRun, key: dg.AssetKey, manifest: DatasetManifest | None, report: AdvanceReport | None
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of `bootstrapped` if it is selected: passed if the dataset serves a version
    that is not stale.

    `manifest` is None before the first advance, `report` if nothing advanced in this run.
    """
    if BOOTSTRAPPED not in selected_checks(run.context, key):
        return
    table = None
    progress = None
    decision = None
    if manifest is not None:
        table = as_unbounded(manifest)
        progress = bootstrap_progress(run.systems, table, run.lake.now())
        decision = table.decision
    if report is not None:
        decision = report.decision
    stale = decision is not None and decision.action == "serve-stale"
    served = table is not None and table.version is not None
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name=BOOTSTRAPPED,
        passed=served and not stale,
        # A stale version that is served, as declared, fails the check, but does not block.
        severity=dg.AssetCheckSeverity.WARN if served else dg.AssetCheckSeverity.ERROR,
        description=_describe_bootstrap(progress, decision),
        metadata=_bootstrap_metadata(progress, decision, report),
    )


@contextmanager
def report_unfinished_bootstrap(run: OpRun, datasets: Mapping[str, dg.AssetKey]) -> Iterator[None]:
    """Report `bootstrapped` of each dataset as failed if an error ends its bootstrap early, and
    re-raise the error. `datasets` maps their names to assets.
    """
    try:
        yield
    except Exception as error:
        for dataset, key in datasets.items():
            if BOOTSTRAPPED in selected_checks(run.context, key):
                _log_unfinished_bootstrap(run, dataset, key, error)
        raise


def _log_unfinished_bootstrap(run: OpRun, dataset: str, key: dg.AssetKey, error: Exception) -> None:
    """Log the check `bootstrapped` of a dataset as failed by the error that ended the run, unless
    its bootstrap is done.
    """
    progress = None
    decision = None
    unknown_progress = ""
    try:
        manifest = StoredVersions(run.lake, dataset).manifest()
        if manifest is not None:
            table = as_unbounded(manifest)
            decision = table.decision
            progress = bootstrap_progress(run.systems, table, run.lake.now())
    except AdjunctError as unread:  # may fail for the same reason as the run
        unknown_progress = f"; its progress is unknown: {unread.problem}"
    if progress is None or progress.state != "done":
        text = (
            f"{_describe_bootstrap(progress, decision)}{unknown_progress}. It ended with: {error}"
        )
        metadata = _bootstrap_metadata(progress, decision, None)
        log_failed_check(run.context, key, BOOTSTRAPPED, text, metadata=metadata, blocking=True)


def log_failed_check(
    context: dg.AssetExecutionContext, key: dg.AssetKey, name: str, text: str, **options: Any
) -> None:
    """Log a failed check as an event, because a failing step has no outputs."""
    context.log_event(
        dg.AssetCheckEvaluation(
            asset_key=key,
            check_name=name,
            passed=False,
            severity=dg.AssetCheckSeverity.ERROR,
            description=text,
            **options,
        )
    )


def selected_checks(context: dg.AssetExecutionContext, key: dg.AssetKey) -> set[str]:
    """Return the names of an asset's checks that this run evaluates."""
    found = set()
    for check in context.selected_asset_check_keys:
        if check.asset_key == key:
            found.add(check.name)
    return found


def _describe_bootstrap(progress: BootstrapProgress | None, decision: Decision | None) -> str:
    """Return the description of the check `bootstrapped`, without a full stop."""
    if progress is None:
        return "The bootstrap has not begun"
    if decision is not None and decision.action == "serve-stale":
        return f"A stale table is served, as declared: {decision.reason}"
    if progress.state == "running":
        return f"The bootstrap has not reached its target: {progress.summary()}"
    return f"Bootstrap {progress.summary()}"


def _bootstrap_metadata(
    progress: BootstrapProgress | None, decision: Decision | None, report: AdvanceReport | None
) -> dict[str, Any]:
    """Return the metadata of the check `bootstrapped`: progress, decision, and records read by this
    run's bootstrap.
    """
    metadata: dict[str, Any] = {}
    if progress is not None:
        metadata["adjunct/per_cent"] = progress.per_cent
        metadata["adjunct/seconds"] = round(progress.seconds, 3)
        metadata["adjunct/bootstrap"] = dg.MetadataValue.json(progress.to_json())
    if decision is not None:
        metadata["adjunct/decision"] = dg.MetadataValue.json(decision.model_dump(mode="json"))
    if report is not None and report.action == "bootstrapped":
        counts = report.counters
        metadata["adjunct/records"] = counts.get("read", 0) + counts.get("loaded", 0)
    return metadata


_UNMATCHED_BY_TIME = {
    "before_history": "were older than its history",
    "null_times": "had no time",
    "early": "had waited long enough, before it was complete up to their time",
    LATE_CHANGES: "changes came too late for records that were read before",
}


def join_check_specs(
    app: Application, outputs: Mapping[LineageNode, dg.AssetSpec]
) -> dict[str, dg.AssetCheckSpec]:
    """Return the check of each join by the join's id, on the first output that its records
    reach.
    """
    checks = {}
    first_of_name: dict[str, str] = {}
    for operator, node in find_first_outputs(app).items():
        match = app.operator(operator).spec.match
        if match is None:
            continue
        name = _name_check("match_rate", operator, first_of_name)
        least = match.min_rate
        if least is None:
            demanded = "no minimum is declared"
        else:
            demanded = f"at least {least:.1%} must match"
        checks[operator] = dg.AssetCheckSpec(
            name,
            asset=outputs[node].key,
            description=(
                f"Share of a run's records that match an entry of {match.node.name} ({operator}):"
                f" {demanded}."
            ),
            metadata={} if least is None else {"adjunct/min_match_rate": float(least)},
        )
    return checks


def _name_check(what: str, join: str, first_of_name: dict[str, str]) -> str:
    """Return the name of a join's check, such as match_rate_planes for the join "join-2-planes".

    Later joins of the same name have their whole id in it. `first_of_name` keeps the first join of
    each name.
    """
    _, _, name = join.split("-", 2)
    is_first = first_of_name.setdefault(name, join) == join
    return to_dagster_name(f"{what}_{name if is_first else join}")


def join_check_results(
    context: dg.AssetExecutionContext,
    app: Application,
    checks: Mapping[str, dg.AssetCheckSpec],
    counters: Mapping[str, Mapping[str, int]],
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of each selected check whose join processed records in this run."""
    for operator, check in checks.items():
        counted = counters.get(operator, {})
        match = app.operator(operator).spec.match
        rows = counted.get("rows", 0)
        is_selected = check.key in context.selected_asset_check_keys
        if not is_selected or rows == 0 or match is None:
            continue
        unmatched = counted.get("unmatched", 0)
        rate = (rows - unmatched) / rows
        text = f"{rate:.2%} of {rows:,} records matched an entry of {match.node.name}"
        facts: dict[str, Any] = {
            "adjunct/match_rate": rate,
            "adjunct/unmatched": unmatched,
            "adjunct/rows": rows,
            f"adjunct/{match.node.kind}": match.node.name,
        }
        passed = True
        if match.min_rate is not None:
            passed = rate >= match.min_rate
            text += f"; at least {match.min_rate:.1%} is required"
            facts["adjunct/min_match_rate"] = float(match.min_rate)
        for name, what in _UNMATCHED_BY_TIME.items():
            if name in counted:
                facts[f"adjunct/{name}"] = counted[name]
            if counted.get(name):
                text += f"; {counted[name]:,} {what}"
        yield dg.AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=passed,
            severity=dg.AssetCheckSeverity.ERROR,
            description=text,
            metadata=facts,
        )


_ON_FAIL = {
    "warn": "are kept",
    "drop": "are dropped",
    "letter": "are diverted",
    "fail": "fail the batch",
}


def restatement_check_specs(
    app: Application, outputs: Mapping[LineageNode, dg.AssetSpec]
) -> dict[str, dg.AssetCheckSpec]:
    """Return the check of each join whose results follow later changes of its dataset, by the
    join's id, on the first output that its records reach.
    """
    checks = {}
    first_of_name: dict[str, str] = {}
    for operator, node in find_first_outputs(app).items():
        match = app.operator(operator).spec.match
        if match is not None and match.restate is not None:
            checks[operator] = dg.AssetCheckSpec(
                _name_check("restated", operator, first_of_name),
                asset=outputs[node].key,
                description=(
                    f"Results of {match.restate.describe()} follow the changes of"
                    f" {match.dataset} ({operator}): at most {match.restate.most_keys:,} keys and"
                    f" {match.restate.most_records:,} records at a time."
                ),
            )
    return checks


def restatement_check_results(
    context: dg.AssetExecutionContext,
    lake: Lake,
    app: Application,
    checks: Mapping[str, dg.AssetCheckSpec],
    counters: Mapping[str, Mapping[str, int]],
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of each selected check: what the run has restated, and since when changes
    wait.
    """
    if not any(check.key in context.selected_asset_check_keys for check in checks.values()):
        return
    waiting: dict[str, datetime] = {}
    for follower in list_lagging_followers(lake, app.name):
        waiting.setdefault(follower.dataset, follower.replaced_at)
    counted = counters.get(RESTATED, {})
    keys = counted.get("changed_keys", 0)
    records = counted.get("records", 0)
    for operator, check in checks.items():
        match = app.operator(operator).spec.match
        if match is None or check.key not in context.selected_asset_check_keys:
            continue
        text = f"{records:,} records of {keys:,} changed keys were restated"
        facts: dict[str, Any] = {"adjunct/changed_keys": keys, "adjunct/records": records}
        since = waiting.get(str(match.dataset))
        if since is not None:
            text += f"; changes of {match.dataset} wait since {since:%Y-%m-%d %H:%M:%S} UTC"
            facts["adjunct/waiting_since"] = dg.MetadataValue.timestamp(since)
        yield dg.AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=True,
            description=text,
            metadata=facts,
        )


def expectation_check_specs(
    app: Application, outputs: Mapping[LineageNode, dg.AssetSpec]
) -> dict[str, dg.AssetCheckSpec]:
    """Return the check of each expectation by its operator's id, on the first output that its
    records reach.
    """
    checks = {}
    for operator, node in find_first_outputs(app).items():
        expected = app.operator(operator).spec.expectation
        if expected is not None:
            checks[operator] = dg.AssetCheckSpec(
                to_dagster_name(f"expect_{expected.name}"),
                asset=outputs[node].key,
                description=(
                    f"All records of a run meet {expected.condition} ({operator}): those that do"
                    f" not {_ON_FAIL[expected.on_fail]}."
                ),
                metadata=_expectation_metadata(expected),
            )
    return checks


def _expectation_metadata(expected: Expectation) -> dict[str, Any]:
    """Return an expectation's condition, and what becomes of records that don't meet it."""
    return {"adjunct/condition": expected.condition, "adjunct/on_fail": expected.on_fail}


def expectation_check_results(
    context: dg.AssetExecutionContext,
    app: Application,
    checks: Mapping[str, dg.AssetCheckSpec],
    counters: Mapping[str, Mapping[str, int]],
    samples: Mapping[str, Sequence[str]],
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of each selected check whose expectation got records in this run."""
    for operator, check in checks.items():
        counted = counters.get(operator, {})
        rows = counted.get("rows", 0)
        expected = app.operator(operator).spec.expectation
        is_selected = check.key in context.selected_asset_check_keys
        if not is_selected or rows == 0 or expected is None:
            continue
        failed = counted.get("failed", 0)
        facts = _expectation_metadata(expected)
        facts |= {"adjunct/rows": rows, "adjunct/failed": failed}
        text = f"{failed:,} of {rows:,} records do not meet {expected.condition}"
        if samples.get(operator):
            facts["adjunct/sample"] = dg.MetadataValue.json(list(samples[operator]))
            text += f", such as {samples[operator][0]}"
        if expected.on_fail == "fail":
            severity = dg.AssetCheckSeverity.ERROR
        else:
            severity = dg.AssetCheckSeverity.WARN
        yield dg.AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=not failed,
            severity=severity,
            description=text,
            metadata=facts,
        )


@contextmanager
def report_failed_operators(
    context: dg.AssetExecutionContext,
    expectations: Mapping[str, dg.AssetCheckSpec],
    restatements: Mapping[str, dg.AssetCheckSpec],
) -> Iterator[None]:
    """Report the check of an operator as failed if the operator fails the batch, and re-raise the
    error.

    An expectation fails the batch if a record does not meet it, a join if there is too much to
    restate. Both mappings are by the operator's id.
    """
    try:
        yield
    except (ExpectationError, RestatementError) as error:
        facts = {}
        if isinstance(error, RestatementError):
            check = restatements.get(error.operator or "")
            if error.changed_keys is not None:
                facts = {"adjunct/changed_keys": error.changed_keys}
        else:
            check = expectations.get(error.operator or "")
        if check is not None and check.key in context.selected_asset_check_keys:
            log_failed_check(context, check.asset_key, check.name, error.problem, metadata=facts)
        raise


ACCEPTED = "adjunct_accepted"


def validator_check_specs(dataset: AdjunctDataset, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return a check for each validator, and for a bounded dataset also whether its newest version
    was accepted.

    A version can be rejected without a validator, for example because of a null key. Raises
    ConfigurationError for a validator with the name of the dataset's other check.
    """
    specs = []
    if isinstance(dataset, BoundedDataset):
        other_check = ACCEPTED
        accepted = (
            "The newest delivered version is published. If it is rejected, the previous one stays"
            " served."
        )
        specs.append(dg.AssetCheckSpec(ACCEPTED, asset=key, description=accepted))
    else:  # `bootstrap_check_specs` makes its other check
        other_check = BOOTSTRAPPED
    for validator in _validators(dataset):
        if validator.name == other_check:
            raise ConfigurationError(
                f"dataset {dataset.name!r}: its validator {validator.name!r} has the name of"
                " another check of it.",
                "Rename the validator.",
                dataset=dataset.name,
            )
        specs.append(
            dg.AssetCheckSpec(
                validator.name,
                asset=key,
                description=f"{describe_rule(validator)}: {_describe_effect(dataset, validator)}.",
                metadata=_rule_metadata(validator),
            )
        )
    return specs


class CheckedVersion(NamedTuple):
    """A version that checks report on, and the verdicts of its validators."""

    ref: VersionRef
    verdicts: Sequence[Verdict]


def _validators(dataset: AdjunctDataset) -> Sequence[Validator]:
    """Return the declared validators; local tables have none."""
    if isinstance(dataset, BoundedDataset | UnboundedDataset):
        return dataset.validators
    return ()


def _describe_effect(dataset: AdjunctDataset, validator: Validator) -> str:
    """Return when a validator is evaluated, and what a failure does."""
    if isinstance(dataset, BoundedDataset):
        effect = "only warns" if validator.severity == "warn" else "rejects the version"
        return f"evaluated before a version is published; a failure {effect}"
    if validator.severity == "warn":
        effect = "only warns"
    elif isinstance(dataset, UnboundedDataset) and dataset.dead_letters is not None:
        effect = f"becomes a dead letter in {dataset.dead_letters}"
    else:
        effect = "fails the advance"
    return f"evaluated for each changed row; one that fails {effect}"


def newest_verdicts(
    store: StoredVersions, manifest: DatasetManifest, name: str | None = None
) -> CheckedVersion | None:
    """Return the version that the checks report on; None if there is none.

    Without a `name`, it is the newest version if that is rejected, else the served one. With a
    name, it is the newest version of this name that is not revoked, served or not.
    """
    refs = list(manifest.listed)
    if name is not None:
        refs = [ref for ref in refs if ref.name == name and ref.state != "revoked"]
    newest = max(refs, key=lambda ref: ref.number, default=None)
    if newest is None:
        return None
    if newest.state == "rejected":
        return CheckedVersion(newest, newest.verdicts)
    if name is not None:
        return CheckedVersion(newest, store.log.read_version(newest).verdicts)
    served = manifest.version
    ref = manifest.ref(manifest.served_id or "")
    if served is None or ref is None:
        return None
    return CheckedVersion(ref, served.verdicts)


def validator_check_results(
    context: dg.AssetExecutionContext,
    dataset: AdjunctDataset,
    key: dg.AssetKey,
    newest: CheckedVersion | None,
) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of the selected checks that were evaluated for this version."""
    if newest is None:
        return
    ref = newest.ref
    selected = selected_checks(context, key)
    version: dict[str, Any] = {"adjunct/version": ref.id, "adjunct/name": ref.name or ""}
    if ACCEPTED in selected:
        yield dg.AssetCheckResult(
            asset_key=key,
            check_name=ACCEPTED,
            passed=ref.state != "rejected",
            description=ref.reason or None,
            metadata=version,
        )
    yield from _verdict_results(context, dataset, key, newest.verdicts, version)


def row_check_results(
    context: dg.AssetExecutionContext,
    dataset: AdjunctDataset,
    key: dg.AssetKey,
    report: AdvanceReport | None,
) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of the selected validators that have seen changed rows in this run."""
    if report is None:
        return
    seen = [verdict for verdict in report.verdicts if verdict.facts.get("rows")]
    version = {"adjunct/version": report.version or ""}
    yield from _verdict_results(context, dataset, key, seen, version)


def _verdict_results(
    context: dg.AssetExecutionContext,
    dataset: AdjunctDataset,
    key: dg.AssetKey,
    verdicts: Sequence[Verdict],
    version: Mapping[str, Any],
) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of the selected checks for these verdicts; `version` is the metadata that
    names the version.
    """
    selected = selected_checks(context, key)
    declared = {validator.name: validator for validator in _validators(dataset)}
    for verdict in verdicts:
        # Its validator may no longer be declared.
        if verdict.name not in declared or verdict.name not in selected:
            continue
        # A changed row that failed became a dead letter, or this advance would have failed.
        are_rows_diverted = dataset.follows_changes
        if verdict.severity == "warn" or are_rows_diverted:
            severity = dg.AssetCheckSeverity.WARN
        else:
            severity = dg.AssetCheckSeverity.ERROR
        yield dg.AssetCheckResult(
            asset_key=key,
            check_name=verdict.name,
            passed=verdict.passed,
            severity=severity,
            description=verdict.message or None,
            metadata={
                **version,
                **_rule_metadata(declared[verdict.name]),
                "adjunct/facts": dg.MetadataValue.json(dict(verdict.facts)),
                **_numbers(verdict.facts),
            },
        )


def _rule_metadata(validator: Validator) -> dict[str, Any]:
    """Return a validator's rule and severity, and its numeric arguments as numbers, which
    Dagster plots.
    """
    return {
        "adjunct/rule": describe_rule(validator),
        "adjunct/severity": validator.severity,
        **_numbers(validator_arguments(validator)),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the values that are numbers, by metadata key."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"adjunct/{name}"] = value
    return numbers


@contextmanager
def report_validator_errors(
    context: dg.AssetExecutionContext, keys: Mapping[str, dg.AssetKey]
) -> Iterator[None]:
    """If a validator can't be evaluated, or a changed row does not meet one, report its check as
    failed, and re-raise the error.

    `keys` maps dataset names to assets.
    """
    try:
        yield
    except (ValidatorError, BadChangeError) as error:
        key = keys.get(error.dataset or "")
        name = error.validator or ""
        if key is not None and name in selected_checks(context, key):
            log_failed_check(context, key, name, str(error))
        raise


def rejection_metadata(ref: VersionRef, served: str | None) -> dict[str, Any]:
    """Return the metadata of the event of a rejected version; `served` is the id of the version
    that stays served, None for none.
    """
    failed = []
    for verdict in ref.verdicts:
        if not verdict.passed:
            failed.append(verdict.model_dump(mode="json"))
    return {
        "adjunct/action": "rejected",
        "adjunct/rejected_version": ref.id,
        "adjunct/name": ref.name or "",
        "adjunct/reason": ref.reason,
        "adjunct/served": served or "none",
        "adjunct/verdicts": dg.MetadataValue.json(failed),
    }


def rejection_warning(dataset: str, ref: VersionRef, served: str | None) -> str:
    """Return the warning about a rejected version, with the commands to inspect, accept or
    remove it. `served` is the id of the version that stays served, None for none.
    """
    if served:
        stays = f"version {served} stays served"
    else:
        stays = "there is no version to serve"
    rejected = (
        f"dataset {dataset}: version {ref.name!r} ({ref.id}) is rejected, {stays}: {ref.reason}."
    )
    remove = f"adjunct dataset remove-version {dataset} {ref.id} --reason …"
    if ref.document is None:  # it was rejected before it was built
        return (
            f"{rejected} It was not built: deliver the content again, and remove this one: {remove}"
        )
    if served:
        look = f"adjunct dataset diff {dataset} {served} {ref.id}"
    else:
        look = f"adjunct dataset items {dataset} --version {ref.id}"
    accept = f"adjunct dataset accept {dataset} {ref.id} --reason …"
    return (
        f"{rejected} Look at it: {look}. Publish it all the same: {accept}; or remove it: {remove}"
    )


def watermark_check_specs(
    app: Application, outputs: Mapping[LineageNode, dg.AssetSpec]
) -> dict[str, dg.AssetCheckSpec]:
    """Return the check of each input stream that declares `max_watermark_lag`, on the
    application's first output.
    """
    first = next(iter(outputs.values()), None)
    checks = {}
    for name, source in app.inputs.items():
        declared = source.event_time
        if first is not None and declared is not None and declared.max_lag is not None:
            checks[name] = dg.AssetCheckSpec(
                to_dagster_name(f"watermark_lag_{name}"),
                asset=first.key,
                description=(
                    f"The watermark of {name} is at most {declared.max_lag} behind the clock."
                ),
                metadata={"adjunct/max_watermark_lag_seconds": declared.max_lag.total_seconds()},
            )
    return checks


def watermark_check_results(
    context: dg.AssetExecutionContext,
    checks: Mapping[str, dg.AssetCheckSpec],
    inputs: "Sequence[InputTimes]",
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of each selected check whose input had a record."""
    for times in inputs:
        check = checks.get(times.stream)
        has_records = times.newest is not None
        if not has_records or check is None or check.key not in context.selected_asset_check_keys:
            continue
        metadata: dict[str, Any] = {
            "adjunct/watermark": str(times.watermark),
            "adjunct/idle": len(times.idle),
        }
        if times.lag is not None:
            metadata["adjunct/watermark_lag_seconds"] = times.lag.total_seconds()
        if times.held_by is not None:
            metadata["adjunct/held_back_by"] = times.held_by
        yield dg.AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=not times.exceeds,
            severity=dg.AssetCheckSeverity.WARN,
            description=f"{times.describe()}; {times.max_lag} is allowed",
            metadata=metadata,
        )


def file_check_specs(
    app: Application, outputs: Mapping[LineageNode, dg.AssetSpec]
) -> dict[str, dg.AssetCheckSpec]:
    """Return the check of each input stream of files, on the application's first output."""
    first = next(iter(outputs.values()), None)
    checks = {}
    for name in app.inputs:
        if first is not None and is_of_files(name):
            checks[name] = dg.AssetCheckSpec(
                to_dagster_name(f"files_set_aside_{name}"),
                asset=first.key,
                description=(
                    f"No file of {name} was set aside among those that the last run has read."
                ),
            )
    return checks


def file_check_results(
    run: OpRun,
    checks: Mapping[str, dg.AssetCheckSpec],
    since: Mapping[str, str],
    after: datetime | None = None,
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of each selected check: a warning if files were set aside at or after the
    offset at which the run began to read the stream (`since`, by stream; the first one if it is
    missing).

    `after` is when the batch before the run was closed. Its run has warned of files without records
    that are at the same offset and were admitted before.
    """
    for name, check in checks.items():
        if check.key not in run.context.selected_asset_check_keys:
            continue
        system, stream = split_stream_name(name)
        streams = run.systems[system]
        assert isinstance(streams, FileStreams)
        if name in since:
            recent = _set_aside_since(streams, stream, int(since[name]), after)
        else:
            recent = _set_aside_since(streams, stream, 0, None)
        metadata: dict[str, Any] = {"adjunct/set_aside": len(recent)}
        if not recent:
            description = "no file was set aside"
        else:
            shown = {file["file"]: file["problem"] for file in recent[:_SHOWN_FILES]}
            metadata["adjunct/files"] = dg.MetadataValue.json(shown)
            description = (
                f"{len(recent)} files were set aside; all of them: adjunct stream files {name}"
                " --problems"
            )
        yield dg.AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=not recent,
            severity=dg.AssetCheckSeverity.WARN,
            description=description,
            metadata=metadata,
        )


def _set_aside_since(
    streams: FileStreams, stream: str, start: int, after: datetime | None
) -> list[dict[str, Any]]:
    """Return the files that are set aside at the offset `start` or later; of those without records
    at this offset only the ones that were admitted after the time `after`, if it is given.
    """
    found = []
    for file in list_files(streams, stream, problems=True):
        if file["offset"] < start:
            continue
        is_at_start = file["offset"] == start and not file["records"]
        if is_at_start and after is not None and file["admitted"] <= after:
            continue
        found.append(file)
    return found
