"""Mistakes in a component's YAML: every command says the same line, reason and next step."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.errors import DagsterUserCodeLoadError, user_code_error_boundary
from dagster._utils.error import serializable_error_info_from_exc_info
from dagster.components.core.component_tree import ComponentTreeException
from dagster_shared.error import SerializableErrorInfo

from dagster_adjunct import LakeStreams, Schema, open_lake
from dagster_adjunct.components import load_applications
from dagster_adjunct.errors import AdjunctError, ComponentError, ConfigurationError
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.code_location.component_mistakes import with_keys
from dagster_adjunct.orchestration.code_location.component_source import read_source
from dagster_adjunct.resources.code_lines import show_lines
from dagster_adjunct.resources.streams.system import LAKE, registered_systems
from tests.kept_processes import program

pytestmark = pytest.mark.lengthy
FILE = "defs/orders/defs.yaml"
RIGHT = """\
type: dagster_adjunct.components.AdjunctComponent

attributes:
  preview_rows: 5
  bounded_datasets:
    products:
      input: lake.products
      key: product
      partitions: 2
      duplicates: last
      bootstrap: true
      validators: [{min_rows: 1}]
      discard: {DiscardPolicy: {keep: 3}}
      description: Prices
  unbounded_datasets:
    customers:
      input: lake.customers
      key: [customer]
      partitions: 2
      max_age: 2d
      sensitive: [town]
  tables:
    spending:
      key: customer
      rate_limit: {RateLimit: {writes_per_second: 50}}
      store:
        SqliteTable:
          path: spending.sqlite
          table: spending
          key: customer
          columns: {customer: string, town: string, spent: double}
          create: true
  applications:
    shop:
      engine: auto
      max_batch_records: 100
      startpoints_expire_after: 90m
      output_streams:
        lake.letters: {partitions: 1}
        lake.priced:
          partitions: 2
          key: customer
      local_tables:
        last:
          key: customer
          schema: {customer: string, product: string}
          partitions: 2
      max_staleness:
        customers: 1h
      steps:
        - input_stream: {name: lake.orders, event_time: at, delay: 5m}
          as: orders
        - filter: quantity > 0
        - join:
            table: customers
            by: customer
            how: left
            select: [town]
        - with_columns:
            doubled: quantity * 2
          as: priced
        - send_to: lake.priced
        - update:
            table: spending
            add: {spent: doubled}
            set: {town: town}
            if_missing: []
            dead_letters: lake.letters
            at_most: 5
        - from: priced
          window:
            kind: {Tumbling: {size: 1h}}
            by: customer
            name: hours
            aggregates: {n: {Count: }}
        - filter: n > 0
"""


@dataclass(frozen=True)
class Mistake:
    """A text in place of another one, and what is said: parts of the reason and the next step.

    `at` is a part of the line that is reported, by default the first line of the new text.
    """

    old: str
    new: str
    reason: str
    step: str
    at: str = ""

    @property
    def text(self) -> str:
        assert RIGHT.count(self.old) >= 1, self.old
        return RIGHT.replace(self.old, self.new, 1)

    @property
    def line(self) -> int:
        wanted = self.at or self.new.strip("\n").split("\n")[0]
        begin = 0 if self.at else len(RIGHT.partition(self.old)[0])
        place = self.text.index(wanted, begin)
        return self.text.count("\n", 0, place) + 1


M = Mistake
APPLICATIONS = RIGHT[RIGHT.index("  applications:") :]
STEPS = RIGHT[RIGHT.index("      steps:") :]
TABLE = RIGHT[RIGHT.index("      key: customer\n      rate") : RIGHT.index("  applications")]
CUSTOMERS = RIGHT[RIGHT.index("      input: lake.customers") : RIGHT.index("  tables:")]
OUTPUT = "        lake.priced:\n          partitions: 2\n"
MISTAKES = {
    # what the planner finds
    "a column of another type": M(
        "set: {town: town}",
        "set: {town: at}",
        "as string, and timestamp is sent",
        "Cast it: cast(at as string).",
        at="- update:",
    ),
    "a key that the records lack": M(
        "by: customer\n            how",
        "by: {client: customer}\n            how",
        "no column 'client'",
        "Correct by, or",
    ),
    "other partition counts": M(
        "partitions: 2\n      max_age",
        "partitions: 3\n      max_age",
        "needs equal",
        "`- partition_by: [customer]`",
        at="- join:",
    ),
    "the order of a dataset": M(
        "max_age: 2d", "order_by: town.at", "order_by names 'town.at'", "Name 'town' itself"
    ),
    "the order of a map": M(
        "max_age: 2d", "order_by: \"t['x']\"", "expected a column, or a path", "or leave order_by"
    ),
    # commas and brackets in SQL
    "a comma in braces": M(
        "add: {spent: doubled}",
        "add: {spent: coalesce(doubled, abs(1), 0)}",
        "a comma divides 'coalesce(doubled'",
        '"coalesce(doubled, abs(1), 0)"',
    ),
    "a comma in brackets": M(
        "select: [town]",
        "select: [coalesce(town, customer) as town, customer]",
        "a comma divides 'coalesce(town'",
        '"coalesce(town, customer) as town"',
    ),
    # kinds of values
    "a number for a duration of a class": M(
        "size: 1h", "size: 1", "size is 1: expected a dur", "as in 1s"
    ),
    "true for a number": M(
        "partitions: 2", "partitions: true", "is true: expected a whole number", "Give a whole"
    ),
    "2.0 for a number": M(
        "partitions: 2", "partitions: 2.0", "is 2.0: expected a whole number", "Write 2."
    ),
    "2.5 for a number": M("partitions: 2", "partitions: 2.5", "is 2.5", "Give a whole number"),
    "a quoted number": M(
        "partitions: 2", "partitions: '2'", "is '2': expected a whole", "2 without quotes"
    ),
    "an octal number": M(
        "partitions: 2", "partitions: 010", "reads 010 as 8", "Write 8 if you mean"
    ),
    "a hexadecimal number": M(
        "partitions: 2", "partitions: 0x10", "reads 0x10 as 16", "Write 16 if"
    ),
    "a number with _": M(
        "max_batch_records: 100", "max_batch_records: 1_00", "reads 1_00 as 100", "'1_00' for"
    ),
    "a number to the base 60": M(
        "preview_rows: 5", "preview_rows: 1:30", "reads 1:30 as 90", "Write 90 if"
    ),
    "a text for a number": M("at_most: 5", "at_most: some", "is 'some': expected", "Give "),
    "a list for a number": M(
        "partitions: 2", "partitions: [2]", "is [2]: expected a whole number", "Give a whole"
    ),
    "a number below its limit": M(
        "partitions: 2", "partitions: 0", "partitions: 0: expected 1 to", "Correct it"
    ),
    "a quoted preview": M(
        "preview_rows: 5", "preview_rows: '5'", "is '5': expected", "5 without quotes"
    ),
    "yes": M("bootstrap: true", "bootstrap: yes", "reads yes as true", "Write true if"),
    "a quoted truth": M(
        "bootstrap: true", "bootstrap: 'true'", "is 'true': expected true or false", "true without"
    ),
    "1 for a truth": M(
        "bootstrap: true", "bootstrap: 1", "is 1: expected true or false", "Give true or false"
    ),
    "a number for a name": M("key: product", "key: 5", "is 5: expected", "in quotes: '5'"),
    "a number in a list of names": M(
        "select: [town]", "select: [town, 7]", "item 2 of select is 7", "'7'"
    ),
    "a truth in a list of names": M(
        "key: [customer]", "key: [true]", "item 1 of key is true", "'true'"
    ),
    "a set for a list": M(
        "select: [town]", "select: !!set {town}", "is a set: expected", "Give a list"
    ),
    "a mapping for a name": M(
        "input: lake.customers", "input: {a: b}", "is {a: b}: expected", "Give"
    ),
    "a number for a text": M(
        "description: Prices", "description: 2024", "is 2024: expected a text", "quotes: '2024'"
    ),
    "another choice": M(
        "how: left",
        "how: outer",
        "is 'outer': expected 'inner' or 'left'",
        "Give 'inner' or 'left'",
    ),
    "another engine": M("engine: auto", "engine: flink", "is 'flink': expected", "Give "),
    "another way with duplicates": M(
        "duplicates: last", "duplicates: first", "is 'first'", "Give 'last' or"
    ),
    "no duration": M("max_age: 2d", "max_age: soon", "'soon'", "30s, 5m"),
    "a number for a duration": M("max_age: 2d", "max_age: 2", "is 2: expected a text", "'2'"),
    "no duration of a class": M("size: 1h", "size: long", "'long'", "30s, 5m"),
    "no duration of staleness": M("customers: 1h", "customers: now", "'now'", "30s, 5m"),
    "no duration of an application": M("after: 90m", "after: 90 mins", "'90 mins'", "30s, 5m"),
    "a text for steps": M(STEPS, "      steps: all\n", "is 'all'", "Give a list"),
    "a list for a table": M(
        OUTPUT + "          key: customer\n", "        lake.priced: [2]\n", "mapping", "Give a"
    ),
    # keys
    "a misspelt key of a dataset": M(
        "duplicates: last", "duplicats: last", "no 'duplicats'", "mean duplicates?"
    ),
    "a misspelt key of a table": M(
        "rate_limit:", "rat_limit:", "takes no 'rat_limit'", "mean rate_limit?"
    ),
    "a misspelt key of an output": M(
        "          key: customer\n      local",
        "          kee: customer\n      local",
        "takes no 'kee'",
        "mean key?",
    ),
    "a misspelt key of a local table": M(
        "schema: {", "scema: {", "takes no 'scema'", "mean schema?"
    ),
    "a misspelt key of an application": M(
        "engine: auto", "engin: auto", "takes no 'engin'", "mean engine?"
    ),
    "a misspelt section": M(
        "unbounded_datasets:", "unbounded_dataset:", "takes no", "unbounded_datasets?"
    ),
    "a misspelt key of a step": M(
        "if_missing: []", "if_mising: []", "takes no 'if_mising'", "mean if_missing?"
    ),
    "an unknown operator": M(
        "- filter: quantity > 0", "- filtr: quantity > 0", "takes no 'filtr'", "mean filter?"
    ),
    "an operator of nothing near": M(
        "- filter: quantity", "- zzz: quantity", "takes no 'zzz'", "Give one of"
    ),
    "on for by": M(
        "by: customer\n            how",
        "on: customer\n            how",
        "reads on as true",
        "Write by",
    ),
    "a misspelt key of a class": M("size: 1h", "sise: 1h", "takes no 'sise'", "It takes size"),
    "a misspelt key of a store": M("create: true", "creat: true", "takes no 'creat'", "It takes"),
    "a class that there is not": M(
        "{Tumbling:", "{Tumblin:", "no class or function 'Tumblin'", "mean 'Tumbling'"
    ),
    "a validator that there is not": M(
        "{min_rows: 1}", "{min_row: 1}", "no class or function 'min_row'", "mean 'min_rows'"
    ),
    "a missing key": M("      key: product\n", "", "products lacks key", "Add key", at="products:"),
    "a missing input": M(
        "      input: lake.customers\n", "", "customers lacks input", "Add input", at="customers:"
    ),
    "a missing argument of a step": M(
        "            by: customer\n            how",
        "            how",
        "lacks by",
        "Add by",
        at="- join:",
    ),
    "no applications": M(APPLICATIONS, "", "lacks applications", "Add applic", at="attributes"),
    "no steps": M(STEPS, "", "lacks steps", "Add steps", at="shop:"),
    "two operators in a step": M(
        "- filter: quantity > 0",
        "- filter: quantity > 0\n          select: [at]",
        "filter and select",
        "Give one of",
    ),
    "a step without an operator": M(
        "- filter: quantity > 0", "- as: nothing", "no operator", "Give one of"
    ),
    # keys given twice
    "a dataset's key twice": M(
        "duplicates: last", "key: other", "the key 'key' is given twice", "Rename or"
    ),
    "a section twice": M(
        "  tables:\n", "  tables: {}\n  tables:\n", "given twice", "Rename", at="  tables:\n    sp"
    ),
    "an operator twice": M(
        "- filter: quantity > 0",
        "- filter: a\n          filter: b",
        "given twice",
        "each step",
        at="filter: b",
    ),
    "a class's argument twice": M(
        "{size: 1h}", "{size: 1h, size: 2h}", "'size' is given twice", "Rename or"
    ),
    # empty values
    "an empty if_missing": M(
        "if_missing: []", "if_missing:", "if_missing is empty", "such as [] for"
    ),
    "an empty key": M("key: product", "key:", "key is empty", "Give a value"),
    "an empty number": M("at_most: 5", "at_most:", "at_most is empty", "or remove the key"),
    "an empty duration": M("max_age: 2d", "max_age:", "max_age is empty", "or remove the key"),
    "an empty section": M(
        RIGHT[RIGHT.index("    spending:") : RIGHT.index("  applications")],
        "",
        "tables is empty",
        "or remove",
        at="  tables:",
    ),
    "an empty argument of a class": M("size: 1h", "size: ", "size is empty", "Give"),
    "an empty argument of a store": M("path: spending.sqlite", "path: ", "path is empty", "Give"),
    "an empty step": M("- filter: quantity > 0", "- filter:", "filter is empty", "Give a value"),
    "an empty name of a step": M("as: orders", "as:", "as is empty", "Give a value"),
    "an empty column": M("doubled: quantity * 2", "doubled:", "doubled is empty", "Give a value"),
    # references to Python
    "a text of Python as a filter": M(
        "filter: quantity > 0", 'filter: {python: "os:sep"}', "plain value '/'", "Write"
    ),
    "a number of Python": M(
        "partitions: 2", 'partitions: {python: "sys:maxsize"}', "expected a whole", "Give"
    ),
    "a module": M(
        "filter: quantity > 0", 'filter: {python: "os:path"}', "is a module", "name a function"
    ),
    "no such module": M(
        "filter: quantity > 0",
        'filter: {python: "nowhere:f"}',
        "'nowhere' is not found",
        "Run from",
    ),
    "no such name": M(
        "filter: quantity > 0", 'filter: {python: "os:sepp"}', "no 'sepp'", "Correct the name"
    ),
    "no reference": M(
        "filter: quantity > 0", 'filter: {python: "os"}', "names nothing", 'Give "module:name"'
    ),
    "a reference that is no text": M(
        "filter: quantity > 0", "filter: {python: 5}", "is 5: expected a text", "'5'"
    ),
    "more than a reference": M(
        "filter: quantity > 0", 'filter: {python: "os:sep", a: 1}', "takes no 'a'", "python"
    ),
    "a class for a function": M(
        "validators: [{min_rows: 1}]",
        'validators: [{python: "os:PathLike"}]',
        "expected a Validator",
        "Pass an object of it",
    ),
    "another thing than a table": M(
        TABLE,
        '      python: "dagster_adjunct:Lake"\n',
        "the class Lake: expected what RemoteTable",
        "Name a RemoteTable",
    ),
    "a bounded dataset for an unbounded one": M(
        CUSTOMERS,
        '      python: "tests.orchestration.dagster.functions_of_components:airports"\n',
        "expected what unbounded_dataset returns",
        "in the section of its kind",
    ),
    # templates
    "a variable that is not set": M(
        "name: lake.orders", 'name: "{{ env.NOT_SET_ANYWHERE }}"', "has no value", "Set"
    ),
    "a template of nothing": M(
        "filter: quantity > 0", 'filter: "{{ nope }}"', "'nope' not found", "Correct the"
    ),
    "a template that fails": M(
        "filter: quantity > 0", 'filter: "{{ 1 / 0 }}"', "ZeroDivisionError", "Correct the"
    ),
    # names
    "a table that is not declared": M(
        "table: customers", "table: custmers", "'custmers' is not declared", "mean 'customers'"
    ),
    "an output that is not declared": M(
        "send_to: lake.priced", "send_to: lake.prized", "'lake.prized' is not", "mean 'lake.priced'"
    ),
    "a step that is not named": M(
        "from: priced", "from: prized", "is named 'prized'", "Give a step's `as`"
    ),
    "staleness of nothing": M(
        "customers: 1h", "custmers: 1h", "'custmers' is no dataset", "mean 'customers'"
    ),
    "a name that is not safe": M(
        "    products:", "    prod.ucts:", "'prod.ucts' is not safe", "Choose another"
    ),
    "a stream without its system": M(
        "input: lake.products", "input: products", "names no system", "lake.products"
    ),
    "a key that the dataset has not": M(
        "by: customer\n            how",
        "by: town\n            how",
        "names 'town'",
        "Name columns of the key",
        at="join:",
    ),
    "a system that there is not": M(
        "name: lake.orders",
        "name: kafka.orders",
        "'kafka', which is not declared",
        "`kafka: {kafka:",
    ),
    "a system of a dataset nobody uses": M(
        "input: lake.products", "input: yard.products", "'yard', which is not", "`kafka: {yard:"
    ),
    "a system of an output": M(
        "        lake.priced:", "        kafka.priced:", "'kafka', which is not", "`kafka: {kafka:"
    ),
    "a system of dead letters": M(
        "max_age: 2d", "on_bad_change: {DeadLetters: lak.bad}", "'lak', which is", "mean 'lake'?"
    ),
    "an output as a table": M(
        "table: customers", "table: lake.priced", "is an output stream: expected a dataset", "Name"
    ),
    "a dataset as a remote table": M(
        "table: spending\n            add",
        "table: customers\n            add",
        "is a dataset",
        "Name",
    ),
    "no owner": M("max_age: 2d", "owners: [me]", "'me' is neither", "team:me"),
    "no group": M("max_age: 2d", "group: a b", "'a b': expected letters", "Choose another"),
    # steps, which are named as they are written
    "an operator's argument beside it": M(
        "            how: left\n            select: [town]\n",
        "            select: [town]\n          how: left\n",
        "step join takes no 'how'",
        "below join",
        at="how: left",
    ),
    "an operator's argument beside it that is an operator": M(
        "            select: [town]",
        "          select: [town]",
        "join and select",
        "indented with its arguments",
        at="- join:",
    ),
    "a key of an application in a step": M(
        "- filter: quantity > 0", "- local_tables: {}", "{local_tables: {}} takes", "an application"
    ),
    "a section in an application": M(
        "engine: auto", "kafka: {}", "shop takes no 'kafka'", "below attributes"
    ),
    "an unknown operator of a named step": M(
        "- input_stream:", "- input_streem:", "step 'orders' takes no 'input_streem'", "mean input_"
    ),
    "a step that is a text": M("- filter: quantity > 0", "- filter", "item 2 of steps is", "Give"),
    "a number in place of a mapping": M(
        "validators: [{min_rows: 1}]", "validators: [5]", "item 1 of validators is 5", "Give a"
    ),
    # keys
    "a number for a key": M(
        "      key: product", "      5: product", "the key 5 is a number", "'5'"
    ),
    "null for a key": M("      key: product", "      ~: product", "the key ~ is null", "'~'"),
    "a number for the name of an application": M(
        "    shop:", "    1.5:", "the key 1.5 is a number", "'1.5'"
    ),
    "a merged key that is misspelt": M(
        "partitions: 2", "<<: {partition: 2}", "takes no 'partition'", "mean partitions?"
    ),
    "a merged number that is octal": M(
        "partitions: 2", "<<: {partitions: 010}", "reads 010 as 8", "Write 8"
    ),
    "a merged key without a value": M(
        "partitions: 2", "<<: {partitions: }", "partitions is empty", "or remove"
    ),
    "a key given twice where it is merged": M(
        "partitions: 2", "<<: {partitions: 2, partitions: 3}", "given twice", "Rename"
    ),
    "two classes in one": M(
        "{min_rows: 1}", "{min_rows: 1, no_nulls: a}", "keys min_rows and no_nulls", "Give {Class"
    ),
    "a name that begins with two underscores": M(
        "{min_rows: 1}", "{__class__: 1}", "no class or function '__class__'", "Give {Class"
    ),
    "a missing argument of a class": M(
        "{min_rows: 1}", "{min_rows: }", "min_rows lacks n", "Add n"
    ),
    # values
    "a number for a duration of staleness": M(
        "customers: 1h", "customers: 1", "is 1: expected a text such as 30s", "as in 1m or 1h"
    ),
    "no applications below their section": M(
        APPLICATIONS, "  applications: {}\n", "is empty: expected at least one", "Give at least"
    ),
    "false for late records": M(
        "- filter: n > 0", "- late_records: false", "is false: expected true", "Give true"
    ),
    "a very long value": M("how: left", f"how: {'x' * 100_000}", "is 'xxx", "Give 'inner' or"),
    "a date by its tag": M("Prices", "!!timestamp 2024-01-01", "is 2024-01-01", "Leave the tag"),
    "a template for a number": M(
        "partitions: 2", 'partitions: "{{ env.N }}"', "expected a whole number", "are for texts"
    ),
    "a variable that is not set within a text": M(
        "name: lake.orders", 'name: "lake.{{ env.NOT_SET_ANYWHERE }}"', "has no value", "Set"
    ),
    "a name that is not there within a text": M(
        "name: lake.orders", 'name: "lake.{{ nope }}orders"', "'nope' not found", "Correct the"
    ),
    "a key that files do not have": M(
        "input: lake.products",
        "input: {FileSource: {url: files, format: csv, schema: {produkt: string}}}",
        "has no column 'product'",
        "mean 'produkt'?",
        at="key: product",
    ),
    "a key that a query does not have": M(
        "input: lake.products",
        "input: {QuerySource: {query: select 1, schema: {produkt: string}}}",
        "has no column 'product'",
        "mean 'produkt'?",
        at="key: product",
    ),
    # what only the planner sees
    "other partitions": M(
        "      key: [customer]\n      partitions: 2",
        "      key: [customer]\n      partitions: 3",
        "needs equal partition counts",
        "partition",
        at="- join:",
    ),
    "a column that there is not": M(
        "filter: quantity > 0", "filter: quantty > 0", "quantty", "Correct"
    ),
}


@pytest.fixture(autouse=True)
def lake_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the stream systems that other tests of this process have declared."""
    for name in {*registered_systems()} - {LAKE}:
        monkeypatch.delitem(registered_systems(), name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project as `adjunct new --yaml` makes it, whose streams are there."""
    folder = tmp_path_factory.mktemp("projects") / "mistaken"
    package = folder / "mistaken"
    (package / "defs" / "orders").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "mistaken"\n'
    )
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    examples = Path(__file__).parents[3] / "examples" / "new_project_in_yaml" / "new_project"
    (package / "definitions.py").write_text((examples / "definitions.py").read_text())
    (package / "pipeline.py").write_text((examples / "pipeline.py").read_text())
    lake = open_lake(folder / "lake")
    streams = LakeStreams(lake)
    orders = Schema.of(product="string", customer="string", quantity="int", at="timestamp")
    streams.create("orders", schema=orders, key=["customer"], partitions=2)
    streams.create(
        "products",
        schema=Schema.of(product="string", price="double"),
        key=["product"],
        partitions=2,
    )
    streams.create(
        "customers",
        schema=Schema.of(customer="string", town="string"),
        key=["customer"],
        partitions=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("ADJUNCT_LAKE", lake.url)
        yield package


def written(project: Path, text: str) -> Path:
    (project / FILE).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mistaken"]:
        del sys.modules[name]
    return project / FILE


def error_of(*command: str) -> AdjunctError:
    error = CliRunner().invoke(root, [*command, "mistaken.pipeline:app"]).exception
    assert isinstance(error, AdjunctError), repr(error)
    return error


def line_of(error: AdjunctError) -> int:
    """Return the line of the file that the error names."""
    assert isinstance(error, ComponentError), repr(error)
    assert error.file is not None
    assert error.file.endswith(FILE)
    assert f"{error.line} | " in error.problem, "the lines around it are shown"
    return error.line or 0


def checked_definitions(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `dg check defs` does in its process."""
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    try:
        dg.ComponentTree.for_project(project).build_defs()
    except ComponentTreeException as error:
        raise (error.__cause__ or error) from None


def checked_yaml(project: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `dg check yaml` prints."""
    from dagster_dg_core.check import check_yaml
    from dagster_dg_core.context import DgContext

    check_yaml(DgContext.for_project_environment(project.parent, {}), [], False)
    return capsys.readouterr().out


def test_the_file_without_a_mistake_is_planned_and_checked(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(project, RIGHT)
    done = CliRunner().invoke(root, ["plan", "mistaken.pipeline:app"])
    assert done.exit_code == 0, done.exception
    assert "validated successfully" in checked_yaml(project, capsys)
    checked_definitions(project, monkeypatch)


@pytest.mark.parametrize("name", MISTAKES)
def test_every_command_says_the_line_the_reason_and_the_next_step(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    written(project, mistake.text)
    for command in (["plan"], ["run", "--master", "none"]):
        written(project, mistake.text)
        said_messages = error_of(*command)
        assert (
            line_of(said_messages),
            mistake.reason in said_messages.problem,
            mistake.step in said_messages.next_step,
        ) == (mistake.line, True, True), f"{command}: {said_messages}"
    with pytest.raises(ComponentError) as caught:
        checked_definitions(project, monkeypatch)
    assert str(caught.value) == str(said_messages)


def test_a_name_that_is_not_declared_lists_each_declared_name_once(project: Path) -> None:
    written(project, MISTAKES["a table that is not declared"].text)
    listed = error_of("plan").next_step.partition("Declared are ")[2].rstrip(".").split(", ")
    assert sorted(listed) == sorted(set(listed))
    assert {"products", "customers", "spending", "lake.priced"} <= set(listed)


NO_YAML = {
    "a bracket that is open": M(
        "select: [town]", "select: [town", "this is not YAML", "bracket", at="- with_columns"
    ),
    "an element in brackets": M(
        "select: [town]", "select: [town[0]]", "this is not YAML", '"items[0]"'
    ),
    "a quote in brackets": M(
        "select: [town]", "select: [f(town, 'a')]", "this is not YAML", '"items[0]"'
    ),
    "an element in braces": M(
        "set: {town: town}", "set: {town: town['a']}", "this is not YAML", '"items[0]"'
    ),
    "a quote that is open": M(
        "description: Prices", "description: 'Prices", "this is not YAML", "a quote"
    ),
    "a colon too many": M(
        "key: product", "key: product: name", "this is not YAML", "Correct it there"
    ),
    "a star without quotes": M(
        "[town]", "[*, town]", "this is not YAML", "begins with * in quotes"
    ),
    "an unknown alias": M("[town]", "[*town]", "undefined alias", "begins with * in quotes"),
    "a percent sign": M("quantity > 0", "%a", "this is not YAML", "begins with % in quotes"),
    "a backquote": M("quantity > 0", "`a`", "this is not YAML", "begins with ` in quotes"),
    "a tag of its own": M(
        "key: product", "key: !env KEY", "for the tag '!env'", "with ! in quotes"
    ),
    "a colon that has no blank": M(
        "key: product", "key:product", "begins in line 8", "a blank", at="      partitions: 2"
    ),
    "a list for a key": M("key: product", "? [a]\n      : b", "a key is a list", "as a text"),
    "a template without quotes": M("lake.products", "{{ env.A }}", "a key is a", "in quotes"),
    "a number that is none": M("key: product", "key: !!int product", "read as int", "the tag out"),
    "an ordered mapping": M("[town]", "!!omap [a: b]", "!!omap can't be read", "the tag out"),
    "a number of 5,000 digits": M("at_most: 5", f"at_most: {'9' * 5000}", "as int", "a shorter"),
    "a tab": M("      key: product", "\tkey: product", "this is not YAML", "Correct it there"),
    "wrong indentation": M(
        "      partitions: 2", "     partitions: 2", "this is not YAML", "Correct it there"
    ),
}


@pytest.mark.parametrize("name", NO_YAML)
def test_what_is_no_yaml_is_reported_with_its_line(name: str, project: Path) -> None:
    mistake = NO_YAML[name]
    for command in (["plan"], ["run", "--master", "none"]):
        written(project, mistake.text)
        said_messages = error_of(*command)
        assert isinstance(said_messages, ComponentError)
        assert mistake.reason in said_messages.problem
        assert mistake.step in said_messages.next_step
        if "quote" not in name:  # which ends at the next one
            assert said_messages.line == mistake.line


ATTRIBUTES = RIGHT[RIGHT.index("attributes:") :]
TYPE = "dagster_adjunct.components.AdjunctComponent"
OF_THE_FILE = {
    **{
        f"the type {found!r}": (RIGHT.replace(TYPE, found, 1), 1, found or "empty", TYPE)
        for found in (
            "dagster_adjunct.components.AdjunctComponen",
            "dagster_adjunkt.components.AdjunctComponent",
            "dagster_adjunct.component.AdjunctComponent",
            "dagster_adjunct/components:AdjunctComponent",
            "adjunctComponent",
            ".AdjunctComponent",
            "dagster_adjunct.bounded_dataset",
            "dagster_adjunct.Schema",
            "5",
            "[a]",
            "",
        )
    },
    "the type of another component": (
        RIGHT.replace(TYPE, "dagster.DefsFolderComponent", 1),
        4,
        "attributes.preview_rows",
        TYPE,
    ),
    "a misspelt type": (RIGHT.replace("type:", "typ:", 1), 1, "typ:", "mean type?"),
    "a section beside attributes": (
        f"{RIGHT}steps: []\n",
        RIGHT.count("\n") + 1,
        "steps:",
        "indented below attributes",
    ),
    "nothing": ("", 1, "no component in the file", f"type: {TYPE}"),
    "a comment alone": ("# nothing\n", 1, "no component in the file", f"type: {TYPE}"),
    "a list": ("- a\n", 1, "no mapping", "A component has type"),
    "an empty document": (f"{RIGHT}---\n", RIGHT.count("\n") + 2, "document is empty", "`---`"),
    "a list of requirements": (
        RIGHT.replace("attributes:", "requirements: [A]\nattributes:"),
        3,
        "requirements: it is ['A']: expected a mapping",
        "A component has type",
    ),
    "post-processing of nothing": (
        RIGHT.replace("attributes:", "post_processing: {asset: []}\nattributes:"),
        3,
        "post_processing.asset",
        "Correct it",
    ),
    "a module of templates that is not there": (
        RIGHT.replace("attributes:", "template_vars_module: nowhere\nattributes:"),
        3,
        "No module named 'nowhere'",
        "Correct its name",
    ),
    "no type": (ATTRIBUTES, 1, "type: Field required", "A component has type"),
    "attributes that are a list": (
        RIGHT.replace(ATTRIBUTES, "attributes: [1]\n"),
        3,
        "attributes:",
        "A component has",
    ),
    "another first key": (
        f"{RIGHT}attribute: {{}}\n",
        RIGHT.count("\n") + 1,
        "attribute:",
        "A component has type",
    ),
    "no attributes": (
        RIGHT.replace(ATTRIBUTES, ""),
        1,
        "there are no attributes",
        "Declare at least one",
    ),
    "empty attributes": (
        RIGHT.replace(ATTRIBUTES, "attributes:\n"),
        3,
        "there are no attributes",
        "Declare at least",
    ),
}


@pytest.mark.parametrize("name", OF_THE_FILE)
def test_what_dagster_finds_in_the_file_is_reported_alike(name: str, project: Path) -> None:
    text, line, reason, step = OF_THE_FILE[name]
    for command in (["plan"], ["run", "--master", "none"]):
        written(project, text)
        said_messages = error_of(*command)
        assert isinstance(said_messages, ComponentError)
        assert said_messages.line == line
        assert reason in said_messages.problem
        assert step in said_messages.next_step


def test_a_component_that_waits_for_its_streams_does_not_fail_the_others(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = project / "defs" / "later"
    other.mkdir()
    waiting = (
        RIGHT.replace("shop:", "later:")
        .replace("last:", "newest:")
        .replace("lake.priced", "lake.later")
    )
    for name in ("products", "customers", "spending", "hours"):
        waiting = waiting.replace(name, f"{name}2")
    (other / "defs.yaml").write_text(waiting)
    written(project, RIGHT)
    caplog.set_level(logging.WARNING)
    try:
        checked_definitions(project, monkeypatch)
        waits = [
            record.getMessage()
            for record in caplog.records
            if "is not planned" in record.getMessage()
        ]
        line = waiting[: waiting.index("lake.customers2")].count("\n") + 1
        said_messages = next(message for message in waits if "'customers2'" in message)
        assert said_messages.startswith(f"{other / 'defs.yaml'}:{line}:")
        assert "Create it, or correct the name." in said_messages
        assert not any(FILE in message for message in waits)
        written(project, RIGHT.replace("filter: quantity > 0", "filter: quantty > 0"))
        with pytest.raises(ComponentError, match="quantty"):  # the other one is planned
            checked_definitions(project, monkeypatch)
    finally:
        shutil.rmtree(other)


def test_sql_that_only_spark_reads_is_checked_with_its_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("java") is None:
        pytest.skip("Spark's parser needs Java")
    mistake = Mistake(
        "filter: quantity > 0", "filter: quantity >>>> 0 from", "Syntax error", "Correct the SQL"
    )
    written(project, mistake.text)
    said_messages = error_of("plan")
    with pytest.raises(ComponentError) as caught:
        checked_definitions(project, monkeypatch)
    for error in (said_messages, caught.value):
        assert line_of(error) == mistake.line
        assert mistake.reason in error.problem
        assert mistake.step in error.next_step


REAL = ["an octal number", "a variable that is not set"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_commands_themselves_print_it(name: str, project: Path) -> None:
    mistake = MISTAKES[name]
    written(project, mistake.text)
    environment = {
        **os.environ,
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "COLUMNS": "400",
        "PYTHONPATH": str(project.parent),
    }
    for command in (
        ["adjunct", "plan", "mistaken.pipeline:app"],
        ["adjunct", "run", "mistaken.pipeline:app", "--master", "none"],
        ["dg", "check", "defs"],
    ):
        done = subprocess.run(
            [program(command[0]), *command[1:]],
            cwd=project.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        printed = done.stdout + done.stderr
        assert done.returncode != 0, printed
        assert f"{FILE}:{mistake.line}" in printed
        assert mistake.reason in printed
        assert mistake.step in printed
        assert 'File "' not in printed, "no stack"


SEEN_BY_THE_SCHEMA = [
    "true for a number",
    "2.5 for a number",
    "a quoted number",
    "a list for a number",
    "a quoted truth",
    "a number for a text",
    "another choice",
    "a misspelt key of a dataset",
    "a misspelt key of an application",
    "a misspelt key of a step",
    "an unknown operator",
    "a missing key",
    "no steps",
    "an empty key",
]


@pytest.mark.parametrize("name", SEEN_BY_THE_SCHEMA)
def test_the_check_of_the_schema_says_the_same_line(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    written(project, mistake.text)
    said_messages = checked_yaml(project, capsys)
    assert f"defs.yaml:{mistake.line} " in said_messages
    if "misspelt" in name:
        right = mistake.step.removeprefix("mean ").removesuffix("?")
        assert f"'{right}'" in said_messages, "it says which keys there are"


READ_AS_BOOLEANS = {
    "a key": M("key: product", "key: no", "key False", ""),
    "one of several keys": M("key: [customer]", "key: [customer, no]", "['customer', False]", ""),
    "a table": M("table: customers", "table: off", "table False", ""),
    "a condition": M("filter: quantity > 0", "filter: yes", "filter True", ""),
    "a list of columns": M("select: [town]", "select: [on]", "select [True]", ""),
}


@pytest.mark.parametrize("name", READ_AS_BOOLEANS)
def test_dgs_own_check_says_how_yaml_reads_a_text_without_quotes(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = READ_AS_BOOLEANS[name]
    written(project, mistake.text)
    said_messages = checked_yaml(project, capsys)
    why = (
        f"{mistake.reason} should not be valid under {{'$comment': \"YAML reads no, off, yes and on"
    )
    assert why in said_messages
    assert f"defs.yaml:{mistake.line} " in said_messages


def test_dgs_own_check_says_nothing_of_texts_to_other_values(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(
        project, RIGHT.replace("key: product", "key: 5").replace("key: [customer]", "key: 'no'")
    )
    said_messages = checked_yaml(project, capsys)
    assert "key 5 is not valid" in said_messages
    assert "YAML reads" not in said_messages


UNREADABLE = {
    "sequences in each other": (
        RIGHT.replace("filter: quantity > 0", f"filter: {'[' * 3000}{']' * 3000}").encode()
    ),
    "another encoding": RIGHT.replace("Prices", "Pr\xe9is").encode("latin-1"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_in_another_encoding_or_nested_too_deeply_is_reported(
    name: str, project: Path
) -> None:
    written(project, RIGHT).write_bytes(UNREADABLE[name])
    assert isinstance(error_of("plan"), ComponentError)


def shown_by_dagster(error: BaseException) -> SerializableErrorInfo:
    """Return what Dagster shows of an error, after it has gone through the loading of a code
    location.
    """
    try:
        with user_code_error_boundary(DagsterUserCodeLoadError, lambda: "loading"):
            raise error
    except Exception:  # noqa: BLE001
        return serializable_error_info_from_exc_info(sys.exc_info())


LOADED = ["a misspelt key of a dataset", "a table that is not declared", "an octal number"]


@pytest.mark.parametrize("name", LOADED)
def test_dagster_shows_a_mistake_without_frames_and_state_of_its_tree(
    name: str, project: Path
) -> None:
    mistake = MISTAKES[name]
    file = written(project, mistake.text)
    with pytest.raises(ComponentError) as caught:
        dg.ComponentTree.for_project(project).build_defs()
    displayed = shown_by_dagster(caught.value).to_string()
    assert displayed.startswith(f"ComponentError: {file}:{mistake.line}:")
    assert mistake.reason in displayed
    assert mistake.step in displayed.strip().split("\n")[-1]
    assert 'File "' not in displayed, "no stack"


def test_messages_stay_hidden_where_dagster_is_reported_to_hide_them(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_REDACT_USER_CODE_ERRORS", "1")
    written(project, MISTAKES["an octal number"].text)
    with pytest.raises(ComponentTreeException) as caught:
        dg.ComponentTree.for_project(project).build_defs()
    assert "reads 010" not in shown_by_dagster(caught.value).to_string()


SEVERAL = f"""\
{RIGHT}---
type: {TYPE}
attributes:
  applications:
    second: {{steps: [{{input_stream: lake.others}}]}}
"""


def test_several_components_in_a_file_are_loaded_and_given_to_programs(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(project, SEVERAL)
    checked_definitions(project, monkeypatch)
    assert set(load_applications(project)) == {"shop", "second"}
    said_messages = error_of("plan")  # asks the file for one application
    assert isinstance(said_messages, ComponentError)
    assert "2 components" in said_messages.problem
    assert "load_applications" in said_messages.next_step


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("    second:", "    shop:", "two components declare an application 'shop'"),
        ("second: {steps", "second: {stepps", "takes no 'stepps'"),
        ("second: {steps", "second: {engine: 5, steps", "engine is 5"),
    ],
)
def test_a_mistake_in_another_component_of_a_file_names_its_own_line(
    old: str, new: str, reason: str, project: Path
) -> None:
    file = written(project, SEVERAL.replace(old, new))
    with pytest.raises(ComponentError, match=reason) as caught:
        load_applications(project)
    assert (caught.value.file, caught.value.line) == (str(file), SEVERAL.count("\n"))


def test_applications_of_a_folder_in_no_project_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_applications(tmp_path)
    assert caught.value.argument == "project"


ALSO_USED = {
    "a stream": ("{input_stream: lake.others}", "{input_stream: lake.orders}", "lake.orders"),
    "an output": ("{input_stream: lake.others}", "{input_stream: lake.priced}", "lake.priced"),
    "a dataset's stream": ("lake.others", "lake.customers", "lake.customers"),
    "an application": ("    second:", "    shop:", "shop"),
}


@pytest.mark.parametrize("name", ALSO_USED)
def test_what_two_components_share_is_named_with_the_lines_of_both(
    name: str, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, shared = ALSO_USED[name]
    file = written(project, SEVERAL.replace(old, new))
    caplog.set_level(logging.WARNING)
    dg.ComponentTree.for_project(project).build_defs()
    last = SEVERAL.count("\n")
    said_messages = f"{shared!r} is in another component, too: {file}:{last}:"
    (found,) = [each.getMessage() for each in caplog.records if said_messages in each.getMessage()]
    assert found.startswith(f"{file}:")
    assert int(found.removeprefix(f"{file}:").partition(":")[0]) < RIGHT.count("\n")


def test_datasets_and_tables_that_no_application_uses_are_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file = written(project, RIGHT)
    checked_definitions(project, monkeypatch)
    line = RIGHT[: RIGHT.index("    products:")].count("\n") + 1
    unused = [each.getMessage() for each in caplog.records if "no application" in each.getMessage()]
    assert len(unused) == 1
    assert unused[0].startswith(f"{file}:{line}:5: no application uses 'products'.")


SECRETS = [
    ("password: hunter2", "password: ***"),
    ("{sasl.password: hunter2, a: 1}", "{sasl.password: ***, a: 1}"),
    ('"api_token": "hunter2"', '"api_token": ***'),
    ("password: env:PASSWORD", "password: env:PASSWORD"),
    ("password_env: PASSWORD", "password_env: PASSWORD"),
    ('password: "{{ env.PASSWORD }}"', 'password: "{{ env.PASSWORD }}"'),
    ("passenger: 5", "passenger: 5"),
]


@pytest.mark.parametrize(("line", "displayed"), SECRETS)
def test_lines_that_are_displayed_hide_secrets(line: str, displayed: str) -> None:
    assert show_lines([line], 1, 1) == f"1 | {displayed}\n  | ^ here"


def test_long_lines_are_cut_around_the_mistake() -> None:
    long = f"{'x' * 100_000}: wrong"
    cut, mark = show_lines([long, long], 1, 100_001).split("\n")[:2]
    assert cut.endswith(": wrong")
    assert mark.index("^") == cut.index(":")
    assert max(map(len, show_lines([long, long], 1, 1).split("\n"))) < 150


def test_aliases_of_aliases_end_at_a_limit(tmp_path: Path) -> None:
    text = "a: &a0 [x, x, x, x, x, x, x, x]\n"
    for number in range(1, 30):
        text += f"b{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 8)}]\n"
    (tmp_path / "defs.yaml").write_text(text)
    _, mistake = read_source(tmp_path / "defs.yaml", (1, 1))
    assert mistake is not None
    assert "more than 100,000 values" in mistake.problem


@pytest.mark.parametrize(
    ("in_python", "in_yaml"),
    [
        ('.map("*", "cast(n as int) as k, 1")', "`- map: ['*', 'cast(n as int) as k, 1']`"),
        ('stream.partition_by("a", "b")', "`- partition_by: [a, b]`"),
        ("partition_by(…, partitions=3)", "`- partition_by: {columns: […], partitions: 3}`"),
        ('.with_columns(k="cast(n as int)")', "`- with_columns: {k: cast(n as int)}`"),
        ("write on={column or path: 'k'}", "write by: {column or path: k}"),
        ("set={'at': …}, drop=[\"a\"]", "set: {at: …}, drop: [a]"),
        ("auto_repartition=True", "auto_repartition: true"),
        ("give output_stream() renamed= and drop=.", "give output_stream renamed and drop."),
        ("'key=1' can't have on=", "'key=1' can't have by"),
        ("LakeStreams(lake).create('a', key=[…])", "LakeStreams(lake).create('a', key=[…])"),
    ],
)
def test_advice_about_the_python_api_is_given_in_yaml(in_python: str, in_yaml: str) -> None:
    assert with_keys(in_python) == in_yaml
