"""Expressions drawn at random, most of which Spark accepts, over one frame without records."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dagster_adjunct.resources.sql.parsed import SPARK_FUNCTIONS

FLAT = {
    "a": "tinyint",
    "b": "smallint",
    "c": "int",
    "d": "bigint",
    "f": "float",
    "g": "double",
    "h": "decimal(10,2)",
    "s": "string",
    "t": "boolean",
    "u": "date",
    "v": "timestamp",
    "w": "binary",
    "End": "string",
    "order": "int",
    "date": "date",
    "value": "string",
    "year": "int",
    "a b": "int",
    "x.y": "string",
    "left": "double",
    "user": "string",
}
NESTED = {"xs": "array<int>", "m": "map<string,int>", "st": "struct<p:int,q:string>"}
TYPES: dict[str, str | None] = {**FLAT, **dict.fromkeys(NESTED)}
DDL = ", ".join(f"`{name}` {kind}" for name, kind in {**FLAT, **NESTED}.items())

_NAMES = [f"`{name}`" if " " in name or "." in name else name for name in TYPES]
_LEAVES = [
    *_NAMES,
    *_NAMES,
    "S",
    "end",
    "`Value`",
    "st.p",
    "ST.Q",
    "st.zz",
    "s.x",
    "nope",
    "nope.x",
    "x",
    "`s.x`",
    "m.k",
    "1",
    "0",
    "300",
    "3000000000",
    "99999999999999999999",
    "1.5",
    "0.05",
    ".5",
    "2.",
    "10.00",
    "00012",
    "1e3",
    "1E-2",
    "1L",
    "2S",
    "3Y",
    "1.5D",
    "2F",
    "1.25BD",
    "-1",
    "'x'",
    '"q"',
    "'it\\'s'",
    "'a' 'b'",
    "r'a\\b'",
    "X'1F'",
    "true",
    "null",
    "date '2020-01-01'",
    "timestamp '2020-01-01'",
    "interval 1 day",
    "interval '1-2' year to month",
    "current_date",
    "current_timestamp()",
    "current_user",
    "localtimestamp",
    "uuid()",
    "pi()",
    "xs[0]",
    "m['k']",
    "/* s */ s",
]
# What stops a program, or looks into its files, is not called.
_FUNCTIONS = sorted(
    name
    for name in SPARK_FUNCTIONS
    if "reflect" not in name and "java" not in name and "raise" not in name
)
_SHAPES = """
({}) | -{} | ~{} | not {} | ! {} | {} is null | {} is not null | isnull({}) | {} is true | {} <=> null | abs({})
sign({}) | round({}) | round({}, 1) | floor({}) | ceil({}) | sqrt({}) | exp({}) | ln({}) | log({}) | cbrt({})
degrees({}) | bin({}) | cast({} as string) | cast({} as int) | cast({} as bigint) | cast({} as double)
cast({} as float) | cast({} as date) | cast({} as timestamp) | cast({} as timestamp_ntz) | cast({} as decimal(12,3))
cast({} as decimal) | cast({} as boolean) | cast({} as binary) | cast({} as varchar(3)) | cast({} as array<int>)
try_cast({} as int) | {}::float | int({}) | bigint({}) | string({}) | double({}) | date({}) | timestamp({})
boolean({}) | binary({}) | to_date({}) | to_timestamp({}) | year({}) | month({}) | day({}) | dayofweek({})
dayofyear({}) | hour({}) | minute({}) | second({}) | quarter({}) | weekofyear({}) | last_day({}) | next_day({}, 'MO')
date_add({}, 1) | date_sub({}, {}) | add_months({}, 1) | {} + interval 1 day | {} - interval 2 hours
date_trunc('hour', {}) | extract(year from {}) | extract(second from {}) | date_format({}, 'yyyy')
unix_timestamp({}) | unix_date({}) | unix_seconds({}) | from_unixtime({}) | timestampadd(DAY, 1, {})
datediff({}, {}) | timestampdiff(MONTH, {}, {}) | datediff(year, {}, u) | dateadd(HOUR, 1, {})
months_between({}, {}) | upper({}) | lower({}) | trim({}) | ltrim({}) | trim(both 'x' from {}) | length({})
char_length({}) | ascii({}) | bit_length({}) | reverse({}) | initcap({}) | hex({}) | unhex({}) | md5({}) | sha1({})
sha2({}, 256) | hash({}) | xxhash64({}) | base64({}) | crc32({}) | soundex({}) | substring({}, 1, 2) | substr({}, 2)
substring({} from 1 for 2) | left({}, 2) | lpad({}, 3, 'x') | chr({}) | repeat({}, 2) | concat_ws('-', {}, {})
translate({}, 'a', 'b') | replace({}, 'a', 'b') | regexp_replace({}, 'a', 'b') | regexp_extract({}, 'a', 0)
split({}, ',') | substring_index({}, '.', 1) | locate('a', {}) | instr({}, 'a') | position('a' in {})
levenshtein({}, {}) | contains({}, 'x') | startswith({}, {}) | {} like 'x%' | {} ilike 'x' | {} like 'x!%' escape '!'
{} rlike 'x' | {} like any ('x', {}) | {} between 1 and {} | {} in (1, {}) | {} not in ('a')
get_json_object({}, '$.x') | to_json(struct({})) | struct({}) | struct({} as p) | named_struct('p', {}, 'q', {})
named_struct('p', {}).p | array({}, {}) | map('k', {}) | size({}) | {}[0] | xs[{}] | m[{}] | element_at(xs, {})
array_contains(xs, {}) | typeof({}) | isnan({}) | nullif({}, {}) | coalesce({}, {}) | nvl({}, {}) | ifnull({}, {})
nvl2(t, {}, {}) | greatest({}, {}) | least({}, {}) | if(t, {}, {}) | if({}, 1, 2) | case when t then {} else {} end
case when {} then 1 end | case {} when {} then 'a' else 'b' end | {} + {} | {} - {} | {} * {} | {} / {} | {} % {}
{} div {} | mod({}, {}) | pow({}, {}) | atan2({}, {}) | try_divide({}, {}) | {} = {} | {} == {} | {} <> {} | {} != {}
{} < {} | {} >= {} | {} <=> {} | {} is distinct from {} | {} and {} | {} or {} | {} & {} | {} | {} | {} ^ {} | {} << 1
{} || {} | concat({}, {}) | transform(xs, x -> x + {}) | transform(xs, S -> S + {})
transform(xs, (x, i) -> x * i + {}) | filter(xs, x -> x > {}) | exists(xs, x -> x = {})
aggregate(xs, 0, (acc, x) -> acc + x) | aggregate(xs, {}, (k, x) -> k, k -> k)
transform(xs, x -> transform(xs, y -> x + y + {})) | map_filter(m, (k, n) -> n > {})
transform(array(st), x -> x.p + {}) | first_value({}) over (order by c)
row_number() over (partition by {} order by s desc nulls last)
sum(c) over (partition by s order by d rows between 1 preceding and current row) | {} collate utf8_lcase
mask({}, lowerChar => 'q') | nope({}) | upper({}, {}) | date_part('year', {}) | a_udf({}) | explode(array({}))
to_char({}, '999') | elt(1, {}, {}) | equal_null({}, {}) | zeroifnull({}) | try_add({}, {})
""".replace("\n", " | ")
SHAPES = [
    shape.strip()
    for shape in _SHAPES.replace("{} | {} ^", "{} \0 {} | {} ^").split(" | ")
    if shape.strip()
]
SHAPES = [shape.replace("\0", "|") for shape in SHAPES]


@dataclass
class Drawn:
    """Draws expressions, the same ones for a seed."""

    seed: int
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def expression(self, depth: int | None = None) -> str:
        """Return an expression without a name."""
        left = self.random.choice((1, 1, 2, 2, 3)) if depth is None else depth
        if left == 0 or self.random.random() < 0.15:
            return self.random.choice(_LEAVES)
        shape = self.random.choice(SHAPES)
        if self.random.random() < 0.1:
            shape = (
                f"{self.random.choice(_FUNCTIONS)}({', '.join(['{}'] * self.random.randrange(5))})"
            )
        return shape.format(*[self._part(left - 1) for _ in range(shape.count("{}"))])

    def item(self) -> str:
        """Return an expression as one of a list, with a name or without."""
        return self.expression() + self.random.choice(
            ("", "", "", " as z", " AS `z z`", " z", " as user")
        )

    def items(self) -> list[str]:
        """Return a list in which expressions use the names of those before them."""
        names = [f"n{number}" for number in range(self.random.choice((2, 3)))]
        made: list[str] = []
        for number, name in enumerate(names):
            shape = self.random.choice(
                (
                    "{}",
                    "{} + {}",
                    "coalesce({}, {})",
                    "upper({})",
                    "case when t then {} else {} end",
                )
            )
            parts = [
                self.random.choice((*names[: number + 1], *_NAMES, "1"))
                for _ in range(shape.count("{}"))
            ]
            made.append(f"{shape.format(*parts)} as {name}")
        return [*self.random.choice(([], [], ["*"], ["* except (s, `a b`)"], ["s"])), *made]

    def _part(self, depth: int) -> str:
        part = self.expression(depth)
        return part if part.isidentifier() or self.random.random() < 0.2 else f"({part})"
