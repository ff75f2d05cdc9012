"""A SELECT of one table's rows: Spark refuses whatever is refused, and takes whatever is not
left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_select, needs_spark_analysis

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPES: dict[str, str | None] = {"shop": "string", "city": "string", "size": "int", "current": "int"}
REFUSED = [
    "select nope from version",
    "select v.nope from version v",
    "select version.size from version v",
    "select * except (nope) from version",
    "select upper(city) c from version where c = 'A'",
    "select * from version where size",
    "select size from version order by nope",
    "select city from version group by nope",
    "select city, count(*) n from version group by city having m > 1",
    "select * from version where city > 1 and upper(array(size)) = 'A'",
    "select x.* from version v",
    "select v.* from version v left anti join other o on v.nope = o.size",
    "select * from version v where transform(array(size), v -> v + nope)[0] > 1",
    "select city.x from version",
    "select 1 = 1, 1 = date '2024-01-01' from version",
]
TAKEN = [
    "select * from version",
    "SELECT V.*, upper(city) AS c, c || 'x' FROM version v WHERE v.size > 1 ORDER BY c, Size",
    "(select distinct city from `version` limit 3)",
    "select version.city from VERSION where current > 1",
    "select transform(array(named_struct('a', size)), v -> v.a) from version v",
    "select array(size) as size from version order by size[0] > 1",
    "select size as n, n + 1 as m, m + n from version",
    "select * from version where date '2024-01-01' > current_date and city in ('a', 'b') or not shop like 'x%'",
    "select v.city, row_number() over (partition by v.city order by v.size) as n from version v",
]
LEFT = [
    "select nope from other",
    "with version as (select 1 as nope) select nope from version",
    "select nope from version v join other o using (shop)",
    "select nope from (select 1 as nope) version",
    "select o.nope from version v cross join other o",
    "select nope from version as v(nope, b, c, d)",
    "select * from version v where exists (select 1 from other where nope = v.size)",
    "select count(*) from version",
    "select nope from version lateral view explode(array(size)) t as nope",
    "select 1 as nope union select 2",
]


def reported(text: str) -> str:
    try:
        check_select("rows", text, "version", TYPES, side="the dataset", next_step="Correct it.")
    except PlanningError as error:
        return error.problem
    return ""


def test_what_is_refused_what_is_taken_and_what_is_left() -> None:
    assert [text for text in REFUSED if not reported(text)] == []
    assert [text for text in (*TAKEN, *LEFT) if reported(text)] == []
    assert [text for text in TAKEN if needs_spark_analysis(text, "version")] == []
    assert [text for text in LEFT if not needs_spark_analysis(text, "version")] == []


@pytest.mark.spark
def test_spark_judges_alike(spark: SparkSession) -> None:
    from pyspark.errors import AnalysisException

    tables = {"version": TYPES, "other": {"shop": "string", "nope": "int", "size": "int"}}
    for name, types in tables.items():
        spark.createDataFrame(
            [], ", ".join(f"{column} {kind}" for column, kind in types.items())
        ).createOrReplaceTempView(f"{name}_of_test")
    named = ", ".join(f"{name} as (select * from {name}_of_test)" for name in tables)

    def takes(text: str) -> bool:
        try:
            return bool(spark.sql(f"with {named} select * from (\n{text}\n)").columns)
        except AnalysisException:
            return False

    try:
        assert [text for text in REFUSED if takes(text)] == []
        assert [text for text in (*TAKEN, *LEFT) if not takes(text)] == []
    finally:
        for name in tables:
            spark.catalog.dropTempView(f"{name}_of_test")
