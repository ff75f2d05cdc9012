"""Applications in YAML are those of Python, mistakes are told with line and column, and the real
`dg` runs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.core.component_tree import ComponentTree
from dagster.components.scaffold.scaffold import ScaffoldRequest
from dagster_shared.yaml_utils import (
    parse_yaml_with_source_position,
    parse_yamls_with_source_position,
)

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Restate,
    Schema,
    VersionPartitions,
    Wait,
    bounded_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.automation import new_records, new_version, stale
from dagster_adjunct.changes import DebeziumEnvelope, DeltaCompaction, Watermark
from dagster_adjunct.components import AdjunctComponent
from dagster_adjunct.errors import ComponentError, ConfigurationError
from dagster_adjunct.orchestration.code_location.components import AdjunctScaffolder
from dagster_adjunct.resources.streams.system import registered_systems
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.tables import RemoteTable, SqliteTable
from dagster_adjunct.validators import min_rows, no_nulls, sql_check, values_in
from dagster_adjunct.windows import Count, Sum, Tumbling
from tests.orchestration.dagster import functions_of_components as functions

FUNCTIONS = functions.__name__
WHOLE = f"""
bounded_datasets:
  planes:
    input: lake.planes
    key: tailnum
    partitions: 8
    validators: [{{min_rows: 1}}]
  airports: {{python: "{FUNCTIONS}:airports"}}
unbounded_datasets:
  weather:
    input: lake.weather
    key: [origin, time_hour]
    partition_by: origin
    partitions: 8
    max_age: 2d
    history: all
    valid_from: time_hour
    history_columns: [visib]
    watermark: {{Watermark: {{delay: 5m, idle_after: 1h}}}}
    compaction: {{DeltaCompaction: {{deltas: 5}}}}
    validators: [{{no_nulls: temp}}, {{sql_check: {{name: cold, sql: temp < 50, severity: warn}}}}]
  customers:
    input: lake.changes
    key: id
    broadcast: true
    changes: {{DebeziumEnvelope: {{columns: "id bigint, name string, named bigint"}}}}
    order_by: {{named: [name]}}
tables:
  seen:
    key: tailnum
    idempotent: true
    store: {{SqliteTable: {{path: seen.sqlite, table: seen, key: tailnum, columns: {{tailnum: string, n: bigint}}}}}}
applications:
  flights:
    description: All of it
    max_batch_records: 1000
    startpoints_expire_after: 90m
    output_streams:
      lake.enriched: {{partitions: 8, key: tailnum}}
      lake.hours: {{partitions: 4, key: origin, description: by hour}}
      lake.late: {{partitions: 1}}
      lake.pairs: {{partitions: 8, key: tailnum}}
      lake.letters: {{partitions: 1}}
    local_tables:
      last: {{key: tailnum, schema: {{tailnum: string, dest: string}}, partitions: 8}}
    max_staleness: {{weather: 1h}}
    steps:
      - input_stream: {{name: lake.flights, event_time: time_hour, delay: 10m, idle_after: 1d}}
        as: flights
      - join: {{table: planes, by: tailnum, how: left, select: [seats, year as built], restate: 7d}}
      - join: {{table: airports, by: {{dest: faa}}, how: left, as_of: time_hour, versions: known-then}}
      - with_columns: {{gone: dest is null, half: seats / 2}}
        as: joined
      - send_to: lake.enriched
      - update: {{table: seen, add: {{n: "1"}}, if_missing: [], dead_letters: lake.letters, at_most: 5}}
      - from: joined
        send_to: {{target: last, on_null_key: skip, deleted: gone}}
      - from: flights
        filter: dep_delay > 0
      - partition_by: [origin]
      - join: {{table: weather, by: [origin, time_hour], as_of: time_hour, wait: {{Wait: {{at_most: 10m, mark: early}}}}, restate: {{Restate: {{age: 7d, every: 1h, most_keys: 500}}}}}}
      - window:
          kind: {{Tumbling: {{size: 1h}}}}
          by: origin
          name: hours
          aggregates: {{flights: {{Count: }}, delay: {{Sum: dep_delay}}}}
          allowed_lateness: 5m
        as: hours
      - send_to: lake.hours
      - from: hours
        late_records: true
      - send_to: lake.late
      - from: flights
        map: ["*", tailnum as plane]
        as: left
      - input_stream: {{name: lake.landings, event_time: at}}
        as: landings
      - from: left
        join_stream: {{right: landings, by: tailnum, within: [0s, 12h], name: met, how: left}}
      - send_to: lake.pairs
  words:
    steps:
      - input_stream: lake.texts
        as: texts
      - input_stream: lake.notes
      - merge: [texts]
      - flat_map: {{what: {{python: "{FUNCTIONS}:words"}}, schema: {{k: string, word: string}}}}
      - expect: {{condition: word > '', name: no-space, on_fail: letter}}
        as: checked
      - sink: {{function: {{python: "{FUNCTIONS}:publish"}}}}
      - join: {{table: customers, by: {{"length(word)": id}}}}
      - from: checked
        failed_records: true
"""
WITHOUT_TIME = (
    "      - window: {kind: {Session: 30s}, by: k, name: bursts, aggregates: {n: {Count: }}}\n"
)


def component(attributes: str, folder: Path | None = None) -> AdjunctComponent:
    """Return the component of these attributes; in a folder, with the lines of a file."""
    text = "type: dagster_adjunct.components.AdjunctComponent\nattributes:\n"
    text += "".join(f"  {line}\n" for line in attributes.strip("\n").split("\n"))
    file = "<string>"
    if folder is not None:
        (folder / "defs.yaml").write_text(text)
        file = str(folder / "defs.yaml")
    parsed = parse_yaml_with_source_position(text, file)
    context = ComponentTree.for_test().load_context
    if folder is not None:
        context = context.with_source_position_tree(parsed.source_position_tree)
    return AdjunctComponent.load(
        AdjunctComponent.get_model_cls().model_validate(parsed.value["attributes"]), context
    )


def in_python() -> list[Application]:
    planes = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=8, validators=[min_rows(1)]
    )
    weather = unbounded_dataset(
        "weather",
        input="lake.weather",
        key=["origin", "time_hour"],
        partition_by="origin",
        partitions=8,
        max_age=timedelta(days=2),
        history="all",
        valid_from="time_hour",
        history_columns=["visib"],
        watermark=Watermark(timedelta(minutes=5), idle_after=timedelta(hours=1)),
        compaction=DeltaCompaction(deltas=5),
        validators=[no_nulls("temp"), sql_check("cold", "temp < 50", severity="warn")],
    )
    envelope = DebeziumEnvelope("id bigint, name string, named bigint")
    customers = unbounded_dataset(
        "customers",
        input="lake.changes",
        key="id",
        broadcast=True,
        changes=envelope,
        order_by={"named": ["name"]},
    )
    store = SqliteTable(
        "seen.sqlite", "seen", "tailnum", columns={"tailnum": "string", "n": "bigint"}
    )
    seen = RemoteTable(
        "seen", key="tailnum", read_function=store, write_function=store, idempotent=True
    )

    app = Application(
        "flights",
        description="All of it",
        max_batch_records=1000,
        startpoints_expire_after=timedelta(minutes=90),
    )
    enriched = app.output_stream("lake.enriched", partitions=8, key="tailnum")
    by_hour = app.output_stream("lake.hours", partitions=4, key="origin", description="by hour")
    late = app.output_stream("lake.late", partitions=1)
    pairs = app.output_stream("lake.pairs", partitions=8, key="tailnum")
    letters = app.output_stream("lake.letters", partitions=1)
    columns = Schema.of(tailnum="string", dest="string")
    last = app.local_table("last", key="tailnum", schema=columns, partitions=8)
    flights = app.input_stream(
        "lake.flights",
        event_time="time_hour",
        delay=timedelta(minutes=10),
        idle_after=timedelta(days=1),
    )
    joined = (
        flights.join(
            app.table(planes),
            on="tailnum",
            how="left",
            select=["seats", "year as built"],
            restate=timedelta(days=7),
        )
        .join(
            app.table(functions.airports),
            on={"dest": "faa"},
            how="left",
            as_of="time_hour",
            versions="known-then",
        )
        .with_columns(gone="dest is null", half="seats / 2")
    )
    joined.send_to(enriched).update(
        app.table(seen), add={"n": "1"}, if_missing=[], dead_letters=letters, at_most=5
    )
    joined.send_to(last, on_null_key="skip", deleted="gone")
    hours = (
        flights.filter("dep_delay > 0")
        .partition_by("origin")
        .join(
            app.table(weather, max_staleness=timedelta(hours=1)),
            on=["origin", "time_hour"],
            as_of="time_hour",
            wait=Wait(timedelta(minutes=10), mark="early"),
            restate=Restate(timedelta(days=7), timedelta(hours=1), most_keys=500),
        )
        .window(
            Tumbling(timedelta(hours=1)),
            by="origin",
            name="hours",
            aggregates={"flights": Count(), "delay": Sum("dep_delay")},
            allowed_lateness=timedelta(minutes=5),
        )
    )
    hours.send_to(by_hour)
    hours.late_records().send_to(late)
    left = flights.map("*", "tailnum as plane")
    landings = app.input_stream("lake.landings", event_time="at")
    within = (timedelta(0), timedelta(hours=12))
    left.join_stream(landings, on="tailnum", within=within, name="met", how="left").send_to(pairs)

    words = Application("words")
    texts, notes = words.input_stream("lake.texts"), words.input_stream("lake.notes")
    reported = notes.merge(texts).flat_map(
        functions.words, schema=Schema.of(k="string", word="string")
    )
    checked = reported.expect("word > ''", name="no-space", on_fail="letter")
    checked.sink(functions.publish).join(words.table(customers), on={"length(word)": "id"})
    checked.failed_records()
    return [app, words]


def facts(app: Application) -> dict[str, Any]:
    of_the_text = ("declared_at", "error_of_source")
    options = {
        name: value
        for name, value in vars(app).items()
        if not name.startswith("_") and name not in of_the_text
    }
    return {
        "options": options,
        "operators": [(operator.id, operator.inputs, operator.spec) for operator in app.operators],
        "datasets": sorted(app.datasets, key=lambda dataset: dataset.name),
        "outputs": [
            (name, stream.partitions, stream.key, stream.description)
            for name, stream in app.outputs.items()
        ],
        "staleness": app.max_staleness,
    }


def test_what_is_declared_in_yaml_is_what_python_declares() -> None:
    made = component(WHOLE).applications()
    expected = in_python()
    assert list(made) == [app.name for app in expected]
    for app in expected:
        found = made[app.name]
        assert facts(found) == facts(app)
        assert found.tables.keys() == app.tables.keys()
        for name, table in found.tables.items():
            assert (table.key, table.idempotent) == (
                app.tables[name].key,
                app.tables[name].idempotent,
            )
            assert table.read_function is table.write_function


MISTAKES = {
    "an operator that refuses": (
        WHOLE + WITHOUT_TIME,
        "- window: {kind: {Session",
        "no event time",
    ),
    "an argument that there is not": (
        WHOLE.replace("size: 1h", "sise: 1h"),
        "sise: 1h",
        "Tumbling takes no 'sise'",
    ),
    "no duration": (WHOLE.replace("size: 1h", "size: soon"), "size: soon", "'soon'"),
    "a class that there is not": (
        WHOLE.replace("{Tumbling:", "{Tumblin:"),
        "Tumblin",
        "no class or function 'Tumblin'",
    ),
    "arguments without their class": (
        WHOLE.replace("restate: 7d", "restate: {age: 7d, every: 1h}"),
        "restate: {age: 7d",
        "Write {Restate: {age: …, every: …}}",
    ),
    "nothing that is declared": (
        WHOLE.replace("table: planes,", "table: plains,"),
        "table: plains",
        "'plains'",
    ),
    "no step of this name": (
        WHOLE.replace("merge: [texts]", "merge: [text]"),
        "text]",
        "is named 'text'",
    ),
    "a function that there is not": (WHOLE.replace(":words", ":wordz"), "python: ", "wordz"),
    "no module": (
        WHOLE.replace(f"{FUNCTIONS}:airports", "nowhere:airports"),
        "python: ",
        "nowhere",
    ),
    "two operators": (
        WHOLE.replace("merge: [texts]", "merge: [texts]\n        filter: k > 1"),
        "merge: [texts]",
        "merge and filter",
    ),
    "another name than the one in Python": (
        WHOLE.replace("airports: {python", "fields: {python"),
        "python: ",
        "'airports'",
    ),
    "a reference that is none": (
        WHOLE.replace(f"{FUNCTIONS}:airports", "airports"),
        "python: ",
        "names nothing",
    ),
    "a name twice": (
        WHOLE.replace("      last: {key", "      planes: {key"),
        "planes: {key",
        "the name 'planes'",
    ),
    "an input with records of a step": (
        WHOLE.replace(
            "- input_stream: lake.notes", "- input_stream: lake.notes\n        from: texts"
        ),
        "from: texts",
        "no records of a step",
    ),
    "a limit of nothing": (WHOLE.replace("{weather: 1h}", "{wether: 1h}"), "wether", "'wether'"),
    "arguments where there are none": (
        WHOLE.replace("{Count: }", "{Count: {of: 1}}"),
        "Count: {of",
        "takes no 'of'",
    ),
    "a variable without a value": (
        WHOLE.replace("lake.texts", '"{{ env.NO_SUCH_VARIABLE }}"'),
        "NO_SUCH_VARIABLE",
        "has no value",
    ),
    "no input": (
        WHOLE.replace("- input_stream: lake.texts\n        as: texts", "- filter: k"),
        "filter: k",
        "input",
    ),
    "a dataset twice": (
        WHOLE.replace(
            "  airports:", "  planes: {input: lake.p, key: k, partitions: 1}\n  airports:"
        ),
        "planes: {input",
        "the key 'planes' is given twice, first in line 4",
    ),
    "a key twice in a step": (
        WHOLE.replace(
            "  filter: dep_delay > 0", "  filter: dep_delay > 0\n        filter: dep_delay > 1"
        ),
        "filter: dep_delay > 1",
        "the key 'filter' is given twice",
    ),
    "a key twice in one line": (
        WHOLE.replace("{Count: }", "{Count: , Count: }"),
        "Count: , Count",
        "'Count' is given",
    ),
    "a step's name twice": (WHOLE.replace("as: left", "as: joined"), "as: joined", "'joined'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_line_and_column(mistake: str, tmp_path: Path) -> None:
    text, there, reported = MISTAKES[mistake]
    with pytest.raises(ComponentError) as caught:
        component(text, tmp_path).applications()
    message = str(caught.value)
    assert reported in message
    file, line, column, _ = message.split(":", 3)
    assert file == str(tmp_path / "defs.yaml")
    lines = Path(file).read_text().splitlines()
    assert there in "\n".join(lines[int(line) - 1 : int(line) + 1])
    assert int(column) > 4
    assert f"{line} | " in message, "the lines around it are shown"


def test_a_kafka_cluster_is_declared_with_its_topics_and_its_mistakes_are_reported(
    tmp_path: Path,
) -> None:
    from dagster_adjunct.kafka import Json, KafkaTopic, KeyText, kafka_system

    topics = "{scans: {KafkaTopic: {key: {KeyText: parcel}, value: {Json: at TIMESTAMP}}}}"
    text = f"kafka:\n  yard: {{bootstrap_servers: '127.0.0.1:1', topics: {topics}}}\n"
    text += "applications:\n  one: {steps: [{input_stream: yard.scans}]}\n"
    component(text).applications()
    declared = {"scans": KafkaTopic(key=KeyText("parcel"), value=Json("at TIMESTAMP"))}
    registered = registered_systems()["yard"]
    kafka_system("yard", bootstrap_servers="127.0.0.1:1", topics=declared)
    assert registered_systems()["yard"] is registered, "the same cluster is registered once"
    for mistake, reported in (
        ("bootstrap_server: a", "no 'bootstrap_server'"),
        ("bootstrap_servers: ''", "no bootstrap"),
    ):
        with pytest.raises(ComponentError, match=reported):
            component(
                text.replace("bootstrap_servers: '127.0.0.1:1'", mistake), tmp_path
            ).applications()


COMPACT = """
tables:
  t:
    key: k
    batches: {BatchProvider: {size: 50, compact: true}}
    store: {SqliteTable: {path: t.sqlite, table: t, key: k, columns: {k: string, n: bigint}}}
applications:
  one: {steps: [{input_stream: lake.in}, {send_to: t}]}
"""


def test_compact_batches_are_declared_in_yaml_and_refused_with_conditions(tmp_path: Path) -> None:
    (app,) = component(COMPACT).applications().values()
    assert (app.tables["t"].batches.compact, app.tables["t"].batches.size) == (True, 50)
    with pytest.raises(ComponentError, match="compact"):
        component(
            COMPACT.replace(
                "    key: k\n    batches", "    key: k\n    idempotent: true\n    batches"
            ),
            tmp_path,
        ).applications()


OTHERS = """
bounded_datasets:
  a: {input: lake.a, key: k, partitions: 1}
  unused: {input: lake.unused, key: k, partitions: 1}
tables:
  t:
    key: k
    store: {RedisTable: {url_env: SHOP_REDIS, prefix: t, key: k, columns: {k: string, n: bigint}}}
applications:
  one:
    description: "2024"
    datasets: [unused]
    output_streams: {lake.out: {partitions: 1}}
    steps:
      - input_stream: {name: lake.in, event_time: ARRIVAL}
      - filter: "'2024-01-01' < k"
      - with_columns: {status: "'new'", none: "cast(null as string)"}
      - with_columns: {python: upper(k)}
      - map: ["*", "'EUR' as currency"]
      - flat_map: "split(k, ',') as part"
      - join: {table: a, by: k}
      - filter: {python: "FUNCTIONS:keep"}
      - send_to: lake.out
  two:
    steps:
      - input_stream: lake.out
      - join: {table: a, by: k}
      - send_to: {target: t, args: [1, a, null]}
""".replace("FUNCTIONS", FUNCTIONS)


def test_texts_stay_as_they_are_written_and_functions_stand_alone() -> None:
    made = component(OTHERS).applications()
    one = Application("one", description="2024")
    a = bounded_dataset("a", input="lake.a", key="k", partitions=1)
    one.table(bounded_dataset("unused", input="lake.unused", key="k", partitions=1))
    (
        one.input_stream("lake.in", event_time=ARRIVAL)
        .filter("'2024-01-01' < k")
        .with_columns(status="'new'", none="cast(null as string)")
        .with_columns(python="upper(k)")
        .map("*", "'EUR' as currency")
        .flat_map("split(k, ',') as part")
        .join(one.table(a), on="k")
        .filter(functions.keep)
        .send_to(one.output_stream("lake.out", partitions=1))
    )
    assert facts(made["one"]) == facts(one)
    assert made["two"].operators[-1].spec.summary() is not None


def test_tables_and_validators_take_paths() -> None:
    text = """
bounded_datasets:
  a:
    input: lake.a
    key: k
    partitions: 1
    validators: [{no_nulls: customer.mail}, {values_in: {column: customer.land, values: [FR]}}]
tables:
  t:
    key: k
    store: {RedisTable: {url_env: SHOP_REDIS, prefix: t, key: k, columns: {k: string, n: bigint}}}
applications:
  one:
    datasets: [a]
    steps:
      - input_stream: lake.in
      - update: {table: t, by: {customer.id: k}, set: [customer.age as n], if_missing: []}
      - send_to: {target: t, by: {customer.id: k}}
"""
    made = component(text).applications()["one"]
    one = Application("one")
    validators = [no_nulls("customer.mail"), values_in("customer.land", ["FR"])]
    a = bounded_dataset("a", input="lake.a", key="k", partitions=1, validators=validators)
    one.table(a)
    table = one.table(made.tables["t"])
    records = one.input_stream("lake.in")
    on = {"customer.id": "k"}
    records.update(table, on=on, set=["customer.age as n"], if_missing=[]).send_to(table, on=on)
    assert facts(made) == facts(one)


def test_an_output_stream_declares_renames_and_removals() -> None:
    out = "{partitions: 1, renamed: {note: remark, customer.mail: email}, drop: [old, lines]}"
    text = f"""
applications:
  one:
    output_streams: {{lake.out: {out}}}
    steps:
      - input_stream: lake.in
      - send_to: lake.out
"""
    changes = component(text).applications()["one"].outputs["lake.out"].changes
    assert changes.renamed == {"note": "remark", "customer.mail": "email"}
    assert changes.drop == ("old", "lines")


def test_datasets_and_local_tables_declare_renames_and_removals() -> None:
    changes = 'renamed: {note: remark, "lines[].sku": item}, drop: old'
    text = f"""
bounded_datasets:
  a: {{input: lake.a, key: k, partitions: 1, {changes}}}
unbounded_datasets:
  b: {{input: lake.b, key: k, broadcast: true, {changes}}}
applications:
  one:
    datasets: [a, b]
    local_tables:
      c: {{key: k, schema: {{k: string, remark: string}}, partitions: 1, {changes}}}
    steps: []
"""
    datasets = component(text).application("one").datasets
    assert {dataset.name for dataset in datasets} == {"a", "b", "c"}
    for dataset in datasets:
        assert dataset.evolution.renamed == {"note": "remark", "lines[].sku": "item"}
        assert dataset.evolution.drop == ("old",)


@pytest.mark.lengthy
def test_an_application_that_reads_what_nobody_has_written_yet_waits_for_its_run(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    streams = LakeStreams(lake)
    for name in ("in", "a", "unused"):
        streams.create(name, schema=Schema.of(k="string"), key=["k"], partitions=1)
    made = component(f"lake: {lake.url}\n{OTHERS.strip()}")
    assert made.build_defs(ComponentTree.for_test().load_context) is not None
    assert "two is not planned: there is no stream 'out'" in caplog.text
    assert "Run the application that writes it." in caplog.text


def test_each_document_of_a_file_is_searched_for_repeated_keys_with_aliases(tmp_path: Path) -> None:
    whole = "type: dagster_adjunct.components.AdjunctComponent\nattributes:\n  bounded_datasets:\n"
    whole += (
        "    a: &a {input: lake.a, key: k, partitions: 1}\n    b: {<<: *a, input: lake.b}\n    c:"
        " *a\n"
    )
    whole += "  applications:\n    APP: {steps: [{input_stream: lake.in}]}\n"
    text = (
        whole.replace("APP", "one")
        + "---\n"
        + whole.replace("APP", "two").replace("lake.b", "lake.b, input: lake.c")
    )
    (tmp_path / "defs.yaml").write_text(text)
    context = ComponentTree.for_test().load_context
    model = AdjunctComponent.get_model_cls()
    one, two = parse_yamls_with_source_position(text, str(tmp_path / "defs.yaml"))
    in_one, in_two = (
        context.with_source_position_tree(each.source_position_tree) for each in (one, two)
    )
    assert list(
        AdjunctComponent.load(model.model_validate(one.value["attributes"]), in_one).applications()
    ) == ["one"]
    with pytest.raises(ComponentError, match="the key 'input' is given twice") as caught:
        AdjunctComponent.load(model.model_validate(two.value["attributes"]), in_two)
    assert str(caught.value).startswith(f"{tmp_path / 'defs.yaml'}:14:")


def test_a_password_in_the_file_is_not_displayed(tmp_path: Path) -> None:
    text = OTHERS.replace("url_env: SHOP_REDIS", "url: redis://me:hunter2@host, sise: 1")
    with pytest.raises(ComponentError, match="RedisTable takes no") as caught:
        component(text, tmp_path).applications()
    assert "hunter2" not in str(caught.value)


def test_what_the_schema_refuses_is_reported_of_the_form_that_is_meant() -> None:
    from jsonschema import Draft202012Validator

    schema = AdjunctComponent.get_model_cls().model_json_schema()
    check = Draft202012Validator(schema)
    steps = [
        {"input_stream": "lake.a"},
        {"join": {"table": "b", "bie": "k"}},
        {"send_to": ["lake.c"]},
    ]
    errors = list(
        check.iter_errors({"applications": {"a": {"steps": steps}}, "tables": {"t": {"keys": "k"}}})
    )
    found = sorted(("/".join(map(str, error.absolute_path)), error.message) for error in errors)
    places = ["applications/a/steps/1/join", "applications/a/steps/2/send_to", "tables/t"]
    assert sorted({place for place, _ in found}) == places
    of_the_join = [message for place, message in found if place == places[0]]
    assert any("'bie' was unexpected" in message for message in of_the_join)
    assert any("'bie' is not one of" in message and "'by'" in message for message in of_the_join)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def test_a_refusal_of_the_planner_names_the_step_where_definitions_are_validated(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""
lake: {lake.url}
bounded_datasets:
  prices: {{input: lake.prices, key: k, partitions: 3}}
applications:
  shop:
    output_streams: {{lake.out: {{partitions: 2, key: k}}}}
    steps:
      - input_stream: lake.orders
      - join: {{table: prices, by: k}}
      - send_to: lake.out
"""
    made = component(text, tmp_path)
    context = ComponentTree.for_test().load_context
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    assert made.build_defs(context) is not None, "there is no lake yet"
    streams = LakeStreams(lake)
    streams.create("orders", schema=Schema.of(k="string"), key=["k"], partitions=2)
    streams.create("prices", schema=Schema.of(k="string", price="double"), key=["k"], partitions=3)
    with pytest.raises(ComponentError, match="equal partition counts") as caught:
        made.build_defs(context)
    assert str(caught.value).startswith(f"{tmp_path / 'defs.yaml'}:11:")
    monkeypatch.delenv("DAGSTER_IS_DEFS_VALIDATION_CLI")
    assert made.build_defs(context) is not None, "code locations load without their lake"
    assert "defs.yaml:11" in str(made.applications()["shop"].operators[1].declared_at)


def test_an_application_that_reads_only_files_is_planned_before_there_is_a_lake(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""
lake: {lake.url}
file_streams:
  readings: {{url: {tmp_path}/landing, format: jsonl, schema: {{station: string, t: double}}}}
applications:
  warm:
    output_streams: {{lake.warm: {{partitions: 1}}}}
    steps:
      - input_stream: files.readings
      - filter: temp > 20
      - send_to: lake.warm
"""
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    context = ComponentTree.for_test().load_context
    with pytest.raises(ComponentError, match="'temp'") as caught:
        component(text, tmp_path).build_defs(context)
    assert str(caught.value).startswith(f"{tmp_path / 'defs.yaml'}:11:")
    assert component(text.replace("temp >", "t >"), tmp_path).build_defs(context) is not None
    assert not lake.exists()


def test_a_file_gives_its_applications_to_programs_with_templates_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_STREAM", "lake.orders")
    text = """
spark: {SparkResource: {master: none, spark_config: {spark.ui.enabled: "false"}}}
applications:
  shop:
    output_streams: {lake.out: {partitions: 1}}
    steps:
      - input_stream: "{{ env.SHOP_STREAM }}"
      - send_to: lake.out
"""
    component(text, tmp_path)
    monkeypatch.chdir(tmp_path)
    (made,) = AdjunctComponent.from_yaml_path(tmp_path / "defs.yaml").components  # type: ignore[attr-defined]
    assert isinstance(made, AdjunctComponent)
    (app,) = made.applications().values()
    assert list(app.inputs) == ["lake.orders"]
    definitions = made.build_defs(ComponentTree.for_test().load_context)
    assert definitions.resources is not None
    spark = definitions.resources["adjunct_spark"]
    assert (spark.master, spark.spark_config) == ("none", {"spark.ui.enabled": "false"})


@pytest.mark.parametrize("template", ["{{ nope }}", "{{ 1 / 0 }}", "{{ env.NOT_SET_ANYWHERE }}"])
def test_a_template_that_fails_is_reported_with_its_line(template: str, tmp_path: Path) -> None:
    text = f"""
applications:
  shop:
    output_streams: {{lake.out: {{partitions: 1}}}}
    steps:
      - input_stream: lake.orders
      - filter: "{template}"
      - send_to: lake.out
"""
    with pytest.raises(Exception, match=r"defs\.yaml:8"):
        component(text, tmp_path)


AUTOMATED = """
bounded_datasets:
  items: {input: lake.items, key: item, broadcast: true, automation_condition: {new_version: }}
unbounded_datasets:
  rates: {input: lake.rates, key: item, broadcast: true, freshness: 30m, automation_condition: {stale: }}
applications:
  shop:
    automation_condition: {new_records: }
    output_streams: {lake.copy: {partitions: 1}}
    datasets: [items, rates]
    steps:
      - input_stream: lake.orders
      - send_to: lake.copy
"""


def test_conditions_are_declared_in_yaml_too() -> None:
    made = component(AUTOMATED)
    app = made.applications()["shop"]
    assert app.automation_condition == new_records()
    assert [dataset.presentation.automation_condition for dataset in app.datasets] == [
        new_version(),
        stale(),
    ]
    sensors = made.build_defs(ComponentTree.for_test().load_context).sensors or ()
    assert "shop_automation" in {sensor.name for sensor in sensors}
    nightly = component(
        AUTOMATED.replace(
            "{new_records: }", "\"{{ dg.AutomationCondition.on_cron('0 3 * * *') }}\""
        )
    )
    assert nightly.applications()["shop"].automation_condition == dg.AutomationCondition.on_cron(
        "0 3 * * *"
    )


def test_an_application_is_found_whatever_its_name_and_else_by_it() -> None:
    only = component("applications:\n  shop: {steps: []}\n")
    assert only.application().name == "shop"
    assert only.application("shop").name == "shop"
    with pytest.raises(ConfigurationError, match="shop") as reported:
        only.application("renamed")
    assert reported.value.argument == "name"
    several = component("applications:\n  shop: {steps: []}\n  till: {steps: []}\n")
    with pytest.raises(ConfigurationError, match="shop, till"):
        several.application()
    assert several.application("till").name == "till"


FOLLOWED = """
unbounded_datasets:
  d:
    input: lake.d
    key: id
    broadcast: true
    changes: {DebeziumEnvelope: {columns: "id BIGINT, note STRING", on_missing: RULE}}
applications:
  shop: {datasets: [d], steps: []}
"""


def test_what_a_missing_column_means_is_declared_in_yaml_with_quotes(tmp_path: Path) -> None:
    for rule, declared in (('"null"', "null"), ('{note: "null"}', {"note": "null"})):
        (dataset,) = component(FOLLOWED.replace("RULE", rule)).application().datasets
        assert dataset.following.changes == DebeziumEnvelope(
            "id BIGINT, note STRING", on_missing=declared
        )
    for rule in ("null", "{note: null}", "{nte: keep}"):
        with pytest.raises(ComponentError, match="on_missing"):
            component(FOLLOWED.replace("RULE", rule), tmp_path).application()


DAYS = """
bounded_datasets:
  rates:
    input: lake.rates
    key: currency
    broadcast: true
    versions: {VersionPartitions: {by: day, start: "2026-11-01", timezone: Pacific/Auckland}}
applications:
  shop: {datasets: [rates], steps: []}
"""


def test_days_of_a_zone_are_declared_in_yaml_too(tmp_path: Path) -> None:
    (rates,) = component(DAYS).applications()["shop"].datasets
    assert rates.versions == VersionPartitions(
        "day", start="2026-11-01", timezone="Pacific/Auckland"
    )
    mistyped = component(DAYS.replace("Auckland", "Aukland"), tmp_path)
    with pytest.raises(ComponentError, match=r"defs.yaml:8:68: .*timezone"):
        mistyped.build_defs(ComponentTree.for_test().load_context)


@pytest.mark.parametrize("line", [4, 9])
def test_a_condition_that_nothing_answers_is_reported_with_the_line_of_what_has_it(
    line: int, tmp_path: Path
) -> None:
    right, wrong = ("new_version", "stale") if line == 4 else ("new_records", "new_version")
    made = component(AUTOMATED.replace(f"{{{right}: }}", f"{{{wrong}: }}"), tmp_path)
    with pytest.raises(ComponentError, match=rf"defs.yaml:{line}:") as caught:
        made.build_defs(ComponentTree.for_test().load_context)
    assert wrong in str(caught.value)


def test_an_example_is_appended_to_a_file_whatever_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "defs.yaml"
    file.write_text("type: a.B\nattributes: {c: d}")
    request = ScaffoldRequest("x", file, "yaml", None, None, append=True)
    AdjunctScaffolder().scaffold(request)
    mine, example = yaml.safe_load_all(file.read_text())
    assert mine == {"type": "a.B", "attributes": {"c": "d"}}
    assert example["type"] == "dagster_adjunct.components.AdjunctComponent"


@pytest.mark.long  # docs/components.md does the same as written, in test_docs.py
def test_a_project_of_dagsters_own_has_a_green_run_of_what_is_scaffolded(tmp_path: Path) -> None:
    """`create-dagster`, `dg scaffold defs`, `dg check`, `dg list`, `dg launch`, as a user types
    them.
    """
    environment = {
        **os.environ,
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": "src",
        "COLUMNS": "200",
    }
    environment = {
        name: value for name, value in environment.items() if not name.startswith("ADJUNCT_")
    }
    environment["DAGSTER_HOME"] = str(tmp_path / "home")
    (tmp_path / "home").mkdir()
    project = tmp_path / "shop"

    def typed(*command: str, folder: Path = project, code: int = 0) -> str:
        program = shutil.which(command[0], path=str(Path(sys.executable).parent))
        assert program, command
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    typed("create-dagster", "project", "shop", "--no-uv-sync", folder=tmp_path)
    assert "dagster_adjunct.components.AdjunctComponent" in typed("dg", "list", "components")
    typed("dg", "scaffold", "defs", "dagster_adjunct.components.AdjunctComponent", "orders")
    folder = project / "src/shop/defs/orders"
    assert "validated successfully" in typed("dg", "check", "yaml")
    typed("python", str(folder / "deliver.py"), "1")
    assert "loaded successfully" in typed("dg", "check", "defs", "--no-check-yaml")
    typed("dg", "launch", "--job", "orders")
    found = json.loads(typed("adjunct", "table", "get", "spending", "ann", "--json"))
    assert {"customer": "ann", "town": "Leeds", "spent": 1.5}.items() <= json.loads(
        json.dumps(found)
    )["record"].items()
    text = (folder / "defs.yaml").read_text()
    (folder / "defs.yaml").write_text(text.replace("broadcast: true", "broadcas: true"))
    assert "defs.yaml:6" in typed("dg", "check", "yaml", code=1)


@pytest.mark.parametrize("line", ["preview_rows: -5", "preview_rows: 51", "lake: ftp://host/lake"])
def test_an_option_of_the_definitions_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    text = f"{line}\napplications: {{one: {{steps: [{{input_stream: lake.in}}]}}}}"
    with pytest.raises(ComponentError) as caught:
        component(text, tmp_path).applications()
    assert (caught.value.line, caught.value.argument) == (3, line.partition(":")[0])
