"""What expressions name is proven when an application is planned, and refused by the line that
wrote it.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.validation.validators import (
    custom,
    no_nulls,
    sql_check,
    unique_keys,
    values_in,
)
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.planner.planning import application, catalog

VISIT = Schema.of(visitor="string", shop="string", spent="double", at="timestamp", times="int")
VISITS = StreamFacts("lake.visits", 4, ("visitor",), SPARK, VISIT)


class _Nowhere(TableWriteFunction):
    def put(self, entries, args=()):
        raise NotImplementedError

    def delete(self, keys, args=()):
        raise NotImplementedError

    def update(self, entries, args=()):
        raise NotImplementedError


def planned(describe, *streams: StreamFacts):
    app = application()
    describe(app, app.input_stream("lake.visits"))
    return build_plan(app, catalog(VISITS, *streams))


def refusal(describe, *streams: StreamFacts) -> PlanningError:
    with pytest.raises(PlanningError) as caught:
        planned(describe, *streams)
    return caught.value


def test_a_mistyped_column_is_refused_with_operator_line_and_the_nearest_name() -> None:
    def describe(app, visits):
        visits.filter("spnt > 0")

    error = refusal(describe)
    line = inspect.getsourcelines(describe)[1] + 1
    assert (
        str(error)
        == f"tests/orchestration/planner/test_columns_of_expressions.py:{line}: filter-2: the"
        " stream has no column 'spnt' ('spnt > 0'); its columns there are visitor, shop, spent,"
        " at, times. Did you mean 'spent'? Correct the condition."
    )
    assert error.next_step == "Did you mean 'spent'? Correct the condition."
    assert (error.operator, error.column) == ("filter-2", "spnt")
    assert error.declared_at == f"tests/orchestration/planner/test_columns_of_expressions.py:{line}"


@pytest.mark.parametrize(
    ("expressions", "column"),
    [
        (["upper(visiter) as v"], "visiter"),
        (["visitor", "Shp"], "Shp"),
        (["* except (spend)"], "spend"),
        (["double + 1 as more", "spent * 2 as double"], "double"),
        (["visitor", "__offset as o"], "__offset"),
        (["shop.city as city"], "shop"),
    ],
)
def test_a_map_names_columns_that_are_there(expressions: list[str], column: str) -> None:
    assert refusal(lambda app, visits: visits.map(*expressions)).column == column


def test_names_of_columns_ignore_case_and_may_be_those_given_before() -> None:
    done = planned(
        lambda app, visits: visits.map("Visitor", "spent * 2 as double", "double + 1 as more")
    )
    assert done.operators[-1].columns == ("Visitor", "double", "more")
    assert done.operators[-1].partitioned_by == ("Visitor",)


def test_all_columns_but_some() -> None:
    kept = planned(lambda app, visits: visits.map("* except (Spent, at)")).operators[-1]
    assert (kept.columns, kept.partitioned_by) == (("visitor", "shop", "times"), ("visitor",))
    assert (
        planned(lambda app, visits: visits.map("* except (visitor)")).operators[-1].partitioned_by
        == ()
    )


def test_a_condition_that_is_no_condition_is_refused() -> None:
    error = refusal(lambda app, visits: visits.filter("upper(shop)"))
    assert "filter-2: the condition 'upper(shop)' is string: expected boolean." in error.problem
    assert error.next_step == "Compare it with something: upper(shop) is not null."
    planned(lambda app, visits: visits.filter("a_function_of_ours(shop)"))


def test_an_expression_that_is_not_closed_is_refused_whatever_the_columns() -> None:
    unknown = StreamFacts("lake.other", 4, ("visitor",), SPARK)
    error = refusal(
        lambda app, visits: app.input_stream("lake.other").filter("upper(shop = 'A'"), unknown
    )
    assert "is not a Spark SQL expression: '(' is not closed" in error.problem


def test_what_updates_say_is_proven() -> None:
    def describe(app, visits):
        table = app.table(
            RemoteTable(
                "last", key="visitor", write_function=_Nowhere(), defaults_may_overwrite=True
            )
        )
        visits.update(table, set={"last_shop": "shopp"}, if_missing={"first": "at"})

    error = refusal(describe)
    assert "update" in error.problem or "send-to-table-2" in error.problem
    assert "the stream has no column 'shopp'" in error.problem
    assert (
        error.next_step == "Did you mean 'shop'? Correct set= for column 'last_shop' of table last."
    )


def test_errors_in_several_branches_are_reported_at_once_without_consequences() -> None:
    def describe(app, visits):
        visits.filter("spnt > 0").filter("this_too > 0")
        visits.map("visitr")
        visits.filter("spent > 0")

    error = refusal(describe)
    assert error.problem.startswith("2 operators can't work:\n- tests/")
    assert "filter-2: " in error.problem
    assert "map-4: " in error.problem
    assert "this_too" not in error.problem
    assert (error.operator, error.column) == ("filter-2", "spnt")


def test_types_of_computed_columns_are_compared_with_those_of_an_existing_output() -> None:
    there = StreamFacts(
        "lake.out", 4, ("visitor",), SPARK, Schema.of(visitor="string", sum="int"), evolves=True
    )

    def describe(app, visits):
        out = app.output_stream("lake.out", partitions=4, key="visitor")
        visits.map("visitor", "upper(shop) as sum").send_to(out)

    assert "sum" in refusal(describe, there).problem


def test_a_contract_is_for_updates() -> None:
    def describe(app, visits):
        table = app.table(
            RemoteTable(
                "last", key="visitor", write_function=_Nowhere(), defaults_may_overwrite=True
            )
        )
        visits.map("visitor", "named_struct('shop', shoop) as update").send_to(
            table, UpdateContract.UPDATE_ONLY
        )

    assert refusal(describe).column == "shoop"


def test_what_is_left_to_spark_is_one_note() -> None:
    def tidy(frame):
        return frame

    def describe(app, visits):
        visits.filter("spent > 0 and shop in (select 'a')").map("upper(shop)").filter(
            "anything > 0"
        )
        visits.map(tidy).filter("anything > 0").map("a", "b")
        visits.map("uper(shop) as a").filter("a > 0")

    (note,) = (note for note in planned(describe).notes if "Unproven" in note)
    assert (
        note
        == 'Unproven; Spark checks it in a dry run before a batch: filter-2: "spent > 0 and shop'
        " in (select 'a')\" (only Spark can analyze a subquery); the columns after map-3"
        " ('upper(shop)' has no name); the columns after map-5 (tidy()); map-8: uper() is not a"
        " Spark function (upper?)."
    )
    proven = planned(lambda app, visits: visits.filter("spent > 0").map("visitor"))
    assert not any("Unproven" in note for note in proven.notes)


def test_operands_whose_types_are_not_certain_have_no_note() -> None:
    def describe(app, visits):
        made = visits.map("visitor", "mask(shop) as hidden", "coalesce(times, shop) as n")
        made.filter("upper(hidden) > 'X' and n > 1")

    assert not any("nproven" in note for note in planned(describe).notes)


def test_ordinary_expressions_have_no_note() -> None:
    def describe(app, visits):
        visits.filter("spent > 0 and shop is not null and at >= '2024-01-01'").map(
            "visitor",
            "upper(trim(shop)) as shop",
            "round(spent * 1.1, 2) as spent",
            "date_trunc('hour', at) as hour",
            "case when times > 3 then 'often' else 'seldom' end as how",
            "coalesce(times, 0) + 1 as times",
            "concat(shop, '-', cast(times as string)) as id",
            "sha2(shop, 256) as digest",
            "to_date(at) as day",
            "substring(shop, 1, 3) as short",
            "split(shop, ' ')[0] as first",
            "date_format(at, 'yyyy') as year",
            "regexp_replace(shop, 'a', 'b') as other",
            "datediff(current_date(), to_date(at)) as age",
            "named_struct('a', spent) as packed",
            "from_json(shop, 'a INT, b STRING').b as b",
            "unix_timestamp(at) as unix",
            "size(split(shop, ' ')) as words",
            "if(spent > 1, 'a', 'b') as big",
            "date_add(to_date(at), 7) as due",
        ).filter(
            "hour < timestamp '2024-01-01 00:00:00' and words between 1 and 3 and first in ('a',"
            " 'b')"
        )

    assert not any("nproven" in note for note in planned(describe).notes)


SHOPS = StreamFacts(
    "lake.shops", 4, ("shop",), SPARK, Schema.of(shop="string", city="string", size="int")
)


@pytest.mark.parametrize(
    ("validator", "column", "problem"),
    [
        (
            no_nulls("shop", "citty"),
            "citty",
            "the dataset has no column 'citty'; its columns are shop, city, size.",
        ),
        (values_in("Sizes", [1]), "Sizes", "no column 'Sizes'"),
        (
            sql_check("big", "sise > 0 and city <> ''"),
            "sise",
            "validator 'big' of dataset 'shops': the dataset has no",
        ),
        (
            sql_check("big", "size + 1"),
            None,
            "'size + 1' has the type int: expected a condition, or a SELECT.",
        ),
        (sql_check("big", "upper(size, 1) = 'A'"), None, "upper() takes 1 argument, and gets 2"),
        (sql_check("some", "count(*) > 1"), None, "'count(*) > 1' takes count() over several rows"),
        (sql_check("some", "sum(size) over () > 1"), None, "takes sum() over several rows"),
        (
            sql_check("rows", "SELECT nope FROM version"),
            "nope",
            "'rows' of dataset 'shops': the dataset has no column 'nope'",
        ),
        (
            sql_check("rows", "select v.shop from version v\nwhere v.sise > 1"),
            "sise",
            "no column 'sise' ('select v.shop",
        ),
        (
            sql_check("rows", "select v.shop from version v\nwhere v.sise > 1"),
            "sise",
            "in line 2); its columns there are",
        ),
        (
            sql_check("rows", "(SELECT DISTINCT * EXCEPT (sise) FROM version)"),
            "sise",
            "no column 'sise'",
        ),
        (
            sql_check("rows", "select upper(city) c from VERSION where c = 'A'"),
            "c",
            "no column 'c'",
        ),
        (sql_check("rows", "select shop from version order by sise"), "sise", "no column 'sise'"),
        (
            sql_check("rows", "select count(*) from version group by citty"),
            "citty",
            "no column 'citty'",
        ),
        (
            sql_check("rows", "select city, count(*) n from version group by 1 having m > 1"),
            "m",
            "no column 'm'",
        ),
        (
            sql_check("rows", "select shop from version v where version.size > 1"),
            "version",
            "no column 'version'",
        ),
        (
            sql_check("rows", "select * from version where size"),
            None,
            "has the type int: expected a condition",
        ),
        (
            sql_check("rows", "select * from version where current_date > size"),
            None,
            "compares 'CURRENT_DATE'",
        ),
        (
            sql_check("rows", "SELECT v.* FROM version v ANTI JOIN current c ON v.sise = c.sise"),
            "sise",
            "no column 'sise'",
        ),
        (
            sql_check("rows", "SELECT version.citty FROM current, version"),
            "citty",
            "no column 'citty'",
        ),
        (values_in("size", [1, "a"]), "size", "it allows 'a' in column 'size', which is int."),
        (values_in("size", [True]), "size", "it allows True in column 'size', which is int."),
        (no_nulls("shop", "city.name"), "city.name", "paths go through structs only"),
        (no_nulls("citty.name"), "citty.name", "no column 'citty'"),
    ],
)
def test_columns_that_validators_name_are_proven(
    validator, column: str | None, problem: str
) -> None:
    def describe(app, visits):
        shops = bounded_dataset(
            "shops", input="lake.shops", key="shop", validators=[validator], broadcast=True
        )
        visits.join(app.table(shops), on="shop", select=["city"])

    error = refusal(describe, SHOPS)
    assert problem in error.problem
    assert (error.dataset, error.column) == ("shops", column)
    assert str(error.declared_at).startswith(
        "tests/orchestration/planner/test_columns_of_expressions.py:"
    )


@pytest.mark.parametrize(
    ("validator", "column", "named"),
    [
        (no_nulls("owner.home.city", "owner.hom.city"), "owner.hom.city", "mail, home"),
        (values_in("owner.home.size", ["a"]), "owner.home.size", "type int"),
        (values_in("owner.home", ["a"]), "owner.home", "'owner.home.city'"),
    ],
)
def test_paths_that_validators_name_are_proven(validator, column: str, named: str) -> None:
    kinds = {"shop": "string", "owner": "struct<mail:string,home:struct<city:string,size:int>>"}

    def describe(app, visits):
        shops = bounded_dataset(
            "shops", input="lake.shops", key="shop", validators=[validator], broadcast=True
        )
        visits.join(app.table(shops), on="shop", select=["owner.mail"])

    error = refusal(describe, StreamFacts("lake.shops", 4, ("shop",), SPARK, Schema.of(kinds)))
    assert (error.dataset, error.column) == ("shops", column)
    assert named in error.next_step


@pytest.mark.parametrize(
    "validator",
    [
        no_nulls("shop", "city"), values_in("size", [1, "2", None]), values_in("city", ["a", 1]),
        sql_check("big", "Size > 0"), unique_keys(),
        sql_check("ours", "ours(size)"), sql_check("at", "__offset > 1"),
        sql_check("at", "select __offset from version"),
        sql_check("rows", "select nope from current"), sql_check("rows", "with version as (select 1 as nope) "
        "select nope from version"), sql_check("rows", "select a.nope from version v join current a using (shop)"),
        sql_check("rows", "select nope from version v join current c using (shop)"),
        sql_check("rows", "select * from version v where exists (select 1 from current where nope = v.nope)"),
        sql_check("rows", "select nope from version lateral view explode(array(size)) t as nope"),
        sql_check("rows", "select upper(city) c, c || '' d from version v group by 1 having d > '' order by v.city"),
        sql_check("rows", "select transform(array(named_struct('a', size)), v -> v.a) from version v"),
        sql_check("rows", "select array(size) size from version order by size[0] > 1"),
        sql_check("rows", "select nope from version as v(nope, other, third)"),
        sql_check("rows", "select count(*) from version"),
        custom("ours", lambda candidate: True),
    ],
)  # fmt: skip
def test_validators_that_may_hold_are_planned(validator) -> None:
    def describe(app, visits):
        shops = bounded_dataset(
            "shops", input="lake.shops", key="shop", validators=[validator], broadcast=True
        )
        visits.join(app.table(shops), on="shop", select=["city"])

    planned(describe, SHOPS)


@pytest.mark.parametrize(
    ("declared", "unproven"),
    [
        ({"validators": [sql_check("rows", "SELECT * FROM versions")]},
         "validator 'rows' of dataset 'shops': 'SELECT * FROM versions' (a SELECT is left to Spark)"),
        ({"validators": [sql_check("rows", "SELECT v.* FROM version v ANTI JOIN current USING (shop)")]},
         "validator 'rows' of dataset 'shops': 'SELECT v.* FROM version v ANTI JOIN current USING (shop)' "
         "(a SELECT is left to Spark)"),
        ({"validators": [sql_check("rows", "SELECT city, max(size) FROM version")]},
         "validator 'rows' of dataset 'shops': 'SELECT city, max(size) FROM version' (a SELECT is left to Spark)"),
        ({"validators": [sql_check("rows", "SELECT * FROM version WHERE uper(city) = 'A'")]},
         "validator 'rows' of dataset 'shops': uper() is not a Spark function (upper?)"),
        ({"validators": [sql_check("rows", "SELEC *")]},
         "validator 'rows' of dataset 'shops': 'SELEC *' (only Spark can parse it (ParseError))"),
        ({"validators": [sql_check("ours", "uper(city) = 'A'")]},
         "validator 'ours' of dataset 'shops': uper() is not a Spark function (upper?)"),
        ({"extractor": Projection("shop string, city string", {"city": "uper(city)"}, where="exists (select 1)")},
         "the projection of dataset 'shops': 'exists (select 1)' (only Spark can analyze a subquery); "
         "the projection of dataset 'shops': uper() is not a Spark function (upper?)"),
    ],
)  # fmt: skip
def test_what_of_a_dataset_is_left_to_spark_is_noted(
    declared: dict[str, Any], unproven: str
) -> None:
    def describe(app, visits):
        app.table(
            bounded_dataset("shops", input="lake.shops", key="shop", broadcast=True, **declared)
        )

    notes = [note for note in planned(describe, SHOPS).notes if "Unproven" in note]
    assert notes == [f"Unproven; Spark checks it when the dataset advances: {unproven}."]


def test_a_select_of_which_all_is_known_is_no_note() -> None:
    def describe(app, visits, select):
        check = sql_check("rows", select)
        app.table(
            bounded_dataset(
                "shops", input="lake.shops", key="shop", broadcast=True, validators=[check]
            )
        )

    text = (
        "select v.shop, upper(city) as c from version v where size > 1 and v.city is not null order"
        " by c"
    )
    assert not any(
        "Unproven" in note
        for note in planned(lambda app, visits: describe(app, visits, text), SHOPS).notes
    )
    unknown = StreamFacts("lake.shops", 4, ("shop",), SPARK)
    (note,) = (
        note
        for note in planned(lambda app, visits: describe(app, visits, text), unknown).notes
        if "Unpro" in note
    )
    assert (
        "(a SELECT is left to Spark); the columns of dataset 'shops' (lake.shops declares none)."
        in note
    )


@pytest.mark.parametrize(
    ("projection", "problem"),
    [
        (
            Projection("shop string, city string", {"city": "upper(citty)"}),
            "the record has no column 'citty'",
        ),
        (
            Projection("shop string, city int", {"city": "upper(city)"}),
            "city as int, but 'upper(city)' has the type string",
        ),
        (
            Projection("shop string, city string", where="sise > 0"),
            "the record has no column 'sise' ('sise > 0')",
        ),
        (Projection("shop string, city string", {"city": "upper(city"}), "'(' is not closed"),
        (
            Projection("shop string, city string", where="size"),
            "where=: the condition 'size' is int: expected boolean",
        ),
        (
            Projection("shop string, city string", where="max(size) > 1"),
            "aggregates several records with max",
        ),
        (
            Projection("shop string, city string", {"city": "ours(city)"}, where="__offset > 1"),
            None,
        ),
        (
            Projection("shop string, city bigint", {"city": "size + 1"}, where="exists (select 1)"),
            None,
        ),
    ],
)
def test_what_projections_of_datasets_name_is_proven(
    projection: Projection, problem: str | None
) -> None:
    def describe(app, visits):
        shops = bounded_dataset(
            "shops", input="lake.shops", key="shop", extractor=projection, broadcast=True
        )
        visits.join(app.table(shops), on="shop", select=["city"])

    if problem is None:
        planned(describe, SHOPS)
        return
    error = refusal(describe, SHOPS)
    assert problem in error.problem
    assert error.dataset == "shops"
    assert str(error.declared_at).startswith(
        "tests/orchestration/planner/test_columns_of_expressions.py:"
    )


@pytest.mark.parametrize(
    "extractor", [None, Projection("shop string, city string", {"city": "upper(city)"})]
)
def test_a_change_stream_is_judged_by_the_rows_that_its_envelopes_hold(
    extractor: Projection | None,
) -> None:
    changes = StreamFacts(
        "lake.shops", 4, ("shop",), SPARK, Schema.of(shop="string", value="string")
    )

    def describe(app, visits, selected="city"):
        shops = unbounded_dataset(
            "shops",
            input="lake.shops",
            key="shop",
            changes=DebeziumEnvelope("shop STRING, city STRING"),
            extractor=extractor,
            broadcast=True,
        )
        visits.join(app.table(shops), on="shop", select=[selected])

    assert (planned(describe, changes).operators[-1].columns or ())[-1] == "city"
    assert refusal(lambda app, visits: describe(app, visits, "value"), changes).column == "value"


@pytest.mark.parametrize(
    "expression", ["to_json(struct(*))", "hash(*, 1)", "cast(struct(* except (spent)) as string)"]
)
def test_functions_of_all_columns_would_take_a_record_s_position(expression: str):
    with pytest.raises(PlanningError) as failure:
        planned(lambda app, visits: visits.with_columns(made=expression))
    assert failure.value.operator == "with-columns-2"


def test_a_star_that_takes_no_hidden_column_is_planned():
    planned(
        lambda app, visits: visits.map(
            "*", "count(*) over (partition by visitor) as n", "times * 2 as twice"
        )
    )
