"""Which results follow later changes of datasets: how their records are found, which operators
compute them again, and why that can't be done for some applications.

A restatement reads the records of changed keys again and sends their results in a higher epoch. So
keys must be found in the inputs, and each output must be able to replace the results of exactly
these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagster_adjunct.assets.reading.change_streams import followed_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import BROADCAST, Operator
from dagster_adjunct.orchestration.operators.stream_facts import (
    Catalog,
    Columns,
    LineageNode,
    require_facts,
)
from dagster_adjunct.orchestration.planner.planned import PlannedRestatement, RestatedInput
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.system import CHANGES, LAKE


def plan_restatements(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns]
) -> tuple[PlannedRestatement, ...]:
    """Return the joins whose results follow later changes of their datasets. Raises PlanningError
    if the results of one can't follow.
    """
    graph = _Graph(app, catalog, columns)
    restatements = []
    for operator in app.operators:
        match = operator.spec.match
        if match is None or match.dataset is None or match.restate is None:
            continue
        stream = f"{CHANGES}.{match.dataset}"
        if stream in app.inputs:
            raise PlanningError(
                f"{operator.id} has restate=, and application {app.name!r} also reads the changes"
                f" of dataset {match.dataset!r} as an input: it would have two positions in"
                f" {stream}.",
                "Read the changes in another application.",
                operator=operator.id,
                dataset=match.dataset,
            )
        inputs = tuple(graph.find_inputs(operator))
        graph.check_effects(operator)
        restatements.append(
            PlannedRestatement(
                operator.id,
                match.dataset,
                changes=stream,
                partitions=app.dataset(match.dataset).partitions or 1,
                records=match.restate.describe(),
                inputs=inputs,
                operators=tuple(graph.list_operators(operator)),
                unsent=tuple(graph.list_unsent(operator)),
                effects=tuple(graph.describe_effects(operator)),
            )
        )
    return tuple(restatements)


def check_restated_sums(app: Application) -> None:
    """Raise PlanningError if results that follow later changes of a dataset are added to a table.

    This is checked before the declarations of tables, whose errors would advise to change the
    declaration, which does not help here.
    """
    graph = _Graph(app, Catalog(), {})
    for join in app.operators:
        match = join.spec.match
        if match is None or match.restate is None:
            continue
        for operator in graph.list_below(join.id):
            send = operator.spec.send
            if send is not None and send.update is not None and send.update.kinds & _SUMS:
                raise graph.refused_sum(join, operator)


_SUMS = {"add", "append"}


@dataclass(frozen=True, slots=True)
class _Traced:
    """Where a value that arrives at a join comes from: its name in the input's records, or None for
    a value that the operator `made_by` computes, or may compute.
    """

    name: str | None
    made_by: str = ""


@dataclass(frozen=True, slots=True)
class _Graph:
    """The operators of an application, the facts of its streams and the columns after each
    operator.
    """

    app: Application
    catalog: Catalog
    columns: Mapping[str, Columns]

    # -- what is read again

    def find_inputs(self, join: Operator) -> Iterator[RestatedInput]:
        """Yield how the records of each input that reaches the join are found.

        Raises PlanningError for an input whose records can't be found by the join's key.
        """
        match = join.spec.match
        assert match is not None
        key_columns = tuple(dict(match.on))  # as they arrive at the join
        found: dict[str, RestatedInput] = {}
        for path in self._paths_above(join):
            source = path[0]
            stream = str(source.spec.reads)
            keys = tuple(self._trace_key(join, name, path) for name in key_columns)
            self._check_input(join, source, keys)
            time = None
            if match.as_of is not None:
                time = self._trace(match.as_of.column, path).name
            facts = require_facts(self.catalog, stream, source.id)
            indexed = tuple(sorted(keys)) in facts.find_by  # which has sorted names
            restated = RestatedInput(stream, keys, time, indexed)
            if found.setdefault(stream, restated) != restated:
                raise PlanningError(
                    f"{join.id} has restate=, and records of {stream} reach it on several ways,"
                    " with their keys in different columns.",
                    f"Join each of them by itself, with restate=, or leave it out of {join.id}.",
                    operator=join.id,
                    stream=stream,
                )
        yield from found.values()

    def _paths_above(self, operator: Operator) -> list[tuple[Operator, ...]]:
        """Return each path from an input to the operator, as the operators on it, both included."""
        if operator.spec.reads is not None:
            return [(operator,)]
        paths = []
        for source in dict.fromkeys(operator.inputs):
            for above in self._paths_above(self.app.operator(source)):
                paths.append((*above, operator))
        return paths

    def _trace_key(self, join: Operator, name: str, path: Sequence[Operator]) -> str:
        """Return the name in the input's records of a column of the key. Raises PlanningError if an
        operator computes it.
        """
        traced = self._trace(name, path)
        if traced.name is not None:
            return traced.name
        made_by = traced.made_by
        raise PlanningError(
            f"{join.id} has restate=, so records are found by {name!r} in {path[0].spec.reads}, but"
            f" {made_by} computes it, or may.",
            f"Join before {made_by}, or by columns that the input has; or send the records to a"
            " stream that has the column, and join them in another application.",
            operator=join.id,
            column=name,
        )

    def _trace(self, name: str, path: Sequence[Operator]) -> _Traced:
        """Return where a value comes from that arrives at the join, the end of a path from its
        input.
        """
        for operator in reversed(path[1:-1]):
            arriving = self.columns[operator.inputs[0]]
            before = operator.spec.came_from(name, arriving)
            if before is None:
                return _Traced(None, made_by=operator.id)
            name = before
        return _Traced(name)

    def _check_input(self, join: Operator, source: Operator, keys: Sequence[str]) -> None:
        """Raise PlanningError for an input in which the records of `keys` can't be found."""
        stream = str(source.spec.reads)
        facts = require_facts(self.catalog, stream, source.id)
        problem = ""
        if source.spec.role in BROADCAST:
            problem = f"all tasks read {stream}"
        elif followed_dataset(stream) is not None:
            problem = (
                f"{stream} has the changes of a dataset, whose records depend on where batches end"
            )
        elif not facts.numbered:
            problem = f"the offsets of {stream} are no numbers, by which single records are read"
        elif not facts.in_arrow:
            problem = f"{stream} can't be read without Spark, in which records are found"
        elif not facts.by_time:
            problem = f"{stream} can't find records by their time, so their age is not known"
        elif len(set(keys)) < len(keys):
            problem = f"it compares two columns of the key with the same one of {stream}"
        if problem:
            raise PlanningError(
                f"{join.id} has restate=, but {problem}.",
                "Leave restate= out, or send the records to a stream of the lake first, and join"
                " them in another application.",
                operator=join.id,
                stream=stream,
            )

    # -- what is computed again

    def list_operators(self, join: Operator) -> list[str]:
        """Return the operators that compute the results of read records again, in order.

        Among them are the operators that send other results of the same records to the same
        streams: in each stream, a higher epoch replaces all results of a record.
        """
        below = self.list_below(join.id)
        streams = {self._written_stream(operator) for operator in below} - {None}
        writers = [operator.id for operator in below if operator.spec.writes is not None]
        inputs = self._streams_above(join.id)
        for operator in self.app.operators:
            writes_same_stream = self._written_stream(operator) in streams
            is_of_same_records = self._streams_above(operator.id) <= inputs
            # Results of state have positions of their own, which no epoch of a record replaces.
            if writes_same_stream and is_of_same_records and not self._has_state(operator.id):
                writers.append(operator.id)
        needed = set()
        for writer in writers:
            needed |= {operator.id for operator in self._above(writer)}
        return [operator.id for operator in self.app.operators if operator.id in needed]

    def list_unsent(self, join: Operator) -> Iterator[str]:
        """Yield the operators that send records to tables and are not below the join. They compute
        the records again but don't send them: the table has the same records.
        """
        below = {operator.id for operator in self.list_below(join.id)}
        for name in self.list_operators(join):
            if name not in below and self.app.operator(name).spec.send is not None:
                yield name

    def check_effects(self, join: Operator) -> None:
        """Raise PlanningError for an operator that would keep or send wrong results after a
        restatement.
        """
        # Operators below the join may keep state although their records reach no output.
        affected = {operator.id for operator in self.list_below(join.id)}
        affected.update(self.list_operators(join))
        unsent = set(self.list_unsent(join))
        for operator in self.app.operators:
            if operator.id not in affected:
                continue
            self._check_state(join, operator)
            if operator.spec.role in BROADCAST:
                raise self._refused(
                    join,
                    operator,
                    "hands all records to every task",
                    "Leave it out, or send the results to a stream, and broadcast that one.",
                )
            if operator.id in unsent:
                continue
            if operator.spec.send is not None:
                self._check_table(join, operator)
            elif operator.spec.role == "output":
                self._check_stream(join, operator)

    def describe_effects(self, join: Operator) -> Iterator[str]:
        """Yield what a restatement does to each output that it sends to again.

        In these texts "they" are the records that are read again.
        """
        unsent = set(self.list_unsent(join))
        for name in self.list_operators(join):
            operator = self.app.operator(name)
            spec = operator.spec
            if spec.writes is None or name in unsent:
                continue
            if spec.send is not None:
                yield f"table {spec.send.table}: their records replace earlier ones, by newest_by"
            elif spec.role == "output":
                yield f"{spec.writes}: {self._describe_epoch(join, operator)}"
            elif spec.writes in self.app.output_tables:
                yield f"{spec.writes}: {self._describe_rows(spec.writes)}"
            else:  # a user's function: local tables are refused by check_effects
                yield f"{spec.writes} is called again with them"

    def _describe_rows(self, table: str) -> str:
        """Return what a restatement does to the rows of an output table; "they" are as in
        `describe_effects`.
        """
        if self.app.output_tables[table].on_replay == "replace":
            return "their rows replace those of their earlier results"
        return "their rows come again in a higher epoch, and those of earlier results stay"

    def _check_state(self, join: Operator, operator: Operator) -> None:
        """Raise PlanningError for an operator that has kept former results."""
        state = ""
        if operator.spec.over_time is not None:
            state = "keeps state of the former results"
        elif operator.spec.feeds is not None:
            state = f"has sent the former results to dataset {operator.spec.feeds}"
        if state:
            raise self._refused(
                join,
                operator,
                f"{state}, and would not follow",
                "Send the results to a stream of the lake, and compute this of its latest results"
                ' (LakeStreams.read, epochs="latest").',
            )

    def _check_stream(self, join: Operator, operator: Operator) -> None:
        """Raise PlanningError for an output stream in which results can't replace former ones."""
        inputs = self._streams_above(operator.id)
        if len(inputs) > 1:
            raise self._refused(
                join,
                operator,
                f"gets records of {' and '.join(sorted(inputs))}, and results that are made of"
                " several inputs have no positions by which they could be replaced",
                "Send what is made of each input to a stream of its own.",
            )
        dropping = self._find_dropping(join, operator)
        if dropping is not None and split_stream_name(str(operator.spec.writes))[0] != LAKE:
            raise self._refused(
                join,
                operator,
                f"sends results to {operator.spec.writes}, which would not show that {dropping.id}"
                " drops one that was there before",
                f"{_how_to_keep(dropping)}, or send to a stream of the lake.",
            )

    def _describe_epoch(self, join: Operator, operator: Operator) -> str:
        """Return what a restatement does to the records of an output stream; "they" are as in
        `describe_effects`.
        """
        again = "their results come again in a higher epoch"
        dropping = self._find_dropping(join, operator)
        if dropping is None:
            return again
        return (
            f"{again}; one that {dropping.id} drops now is missing in the latest results only, and"
            " an application that reads the stream is not told"
        )

    def _check_table(self, join: Operator, operator: Operator) -> None:
        """Raise PlanningError for a remote table in which results can't replace former ones."""
        send = operator.spec.send
        assert send is not None
        table = self.app.tables[send.table]
        changed = operator.spec.changed(self.app, self.columns[operator.inputs[0]])
        if changed.adds:
            raise self.refused_sum(join, operator)
        if table.newest_by is None:
            raise self._refused(
                join,
                operator,
                f"writes table {table.name}, in which results of old records would replace those of"
                " newer ones",
                'Declare the table with newest_by="COLUMN", such as the time of the records.',
            )
        if table.on_replay == "skip":
            raise self._refused(
                join,
                operator,
                f'writes table {table.name}, which has on_replay="skip" and so takes no record'
                " twice",
                "Declare the table without on_replay.",
            )
        dropping = self._find_dropping(join, operator)
        if dropping is not None:
            raise self._refused(
                join,
                operator,
                f"writes table {table.name}, and {dropping.id} may drop a record whose row the"
                " table has by then, which would stay",
                f"{_how_to_keep(dropping)}.",
            )
        for name in send.key_sources(table.key):
            if self._may_depend_on_entries(operator.inputs[0], name):
                raise self._refused(
                    join,
                    operator,
                    f"writes table {table.name} under {name!r}, which may be made of entries: when"
                    " they change, the row under the former key would stay",
                    "Let the table have a key of columns of the input.",
                )

    def refused_sum(self, join: Operator, operator: Operator) -> PlanningError:
        """Return the error for an operator that adds results to columns of a table."""
        assert operator.spec.send is not None
        return self._refused(
            join,
            operator,
            f"adds or appends to table {operator.spec.send.table}, which would count records twice",
            "Set values, in a table with newest_by; or compute sums over the latest results of a"
            " stream.",
        )

    def _find_dropping(self, join: Operator, operator: Operator) -> Operator | None:
        """Return the first operator up to this one that may drop a record now that it passed on
        before a dataset or table changed; None if none may.
        """
        below = {each.id for each in self.list_below(join.id)}
        for above in self._above(operator.id):
            depends_on_entries = above.id in below or above.spec.match is not None
            if depends_on_entries and not above.spec.keeps_each:
                return above
        return None

    def _may_depend_on_entries(self, operator: str, name: str) -> bool:
        """Whether a column of the records that leave an operator may be made of values of a dataset
        or remote table; True if its sources are unknown.
        """
        column = self.columns[operator].find(name)
        if column is None or not column.sources:
            return True
        # Records may have come through an output stream of the application itself: then the sources
        # of their columns are those of the records that were sent to it.
        before_output = {}
        for above in self._above(operator):
            if above.spec.role == "output":
                before_output[LineageNode("stream", str(above.spec.writes))] = above.inputs[0]
        for node, source in column.sources:
            if node in before_output:
                if self._may_depend_on_entries(before_output[node], source):
                    return True
            elif node.kind != "stream":
                return True
        return False

    def _refused(
        self, join: Operator, operator: Operator, problem: str, next_step: str
    ) -> PlanningError:
        """Return the error for a join whose results can't be restated because of an operator: its
        id, the `problem` and the `next_step` are parts of the text.
        """
        match = join.spec.match
        return PlanningError(
            f"{join.id} has restate=, but {operator.id} {problem}.",
            f"{next_step} Or leave restate= out.",
            operator=operator.id,
            dataset=None if match is None else match.dataset,
        )

    # -- the graph

    def _written_stream(self, operator: Operator) -> str | None:
        """Return the stream that an operator writes; None if it writes something else or
        nothing.
        """
        target = operator.spec.target(self.app)
        if target is None or target.kind != "stream":
            return None
        return target.name

    def list_below(self, join: str) -> list[Operator]:
        """Return the join and all operators that its records reach, in order."""
        reached = {join}
        found = []
        for operator in self.app.operators:
            if operator.id in reached or not reached.isdisjoint(operator.inputs):
                reached.add(operator.id)
                found.append(operator)
        return found

    def _above(self, operator: str) -> list[Operator]:
        """Return the operators whose records reach this one, and itself, in order."""
        needed = {operator}
        found = []
        for candidate in reversed(self.app.operators):
            if candidate.id in needed:
                needed.update(candidate.inputs)
                found.append(candidate)
        return found[::-1]

    def _streams_above(self, operator: str) -> set[str]:
        """Return the input streams whose records reach an operator."""
        streams = set()
        for above in self._above(operator):
            if above.spec.reads is not None:
                streams.add(above.spec.reads)
        return streams

    def _has_state(self, operator: str) -> bool:
        """Whether an operator, or one before it, keeps state."""
        return any(above.spec.over_time is not None for above in self._above(operator))


def _how_to_keep(dropping: Operator) -> str:
    """Return what keeps the records that an operator drops, as the beginning of a sentence."""
    if dropping.spec.match is not None:
        return 'Keep the record, with nulls (how="left")'
    return (
        f"Let {dropping.id} come before the join, or keep its records with a column of its verdict"
    )
