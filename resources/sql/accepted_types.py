"""Which types Spark's functions certainly take, argument by argument: those that it takes in all of its modes.

What it takes in one of them only is not here; `test_accepted_types.py` holds all of it against Spark. A function
stands behind the kinds of its arguments (`type_kinds.py`), optional ones as well, or the name of several kinds. "*"
repeats the last, "**" the last two, and "!" asks for a value that is written out. A name with a number behind it,
"dateadd/3", is the function with so many arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.nested_types import element_type
from dagster_adjunct.resources.sql.type_kinds import NUMBERS, READ_AS_NUMBERS, READ_AS_TEXTS, WHOLE, Kinds, kind_of_type

if TYPE_CHECKING:
    from sqlglot import exp

_SEVERAL = {
    "numeric": NUMBERS,
    "number": READ_AS_NUMBERS,
    "text": READ_AS_TEXTS,
    "bytes": ("string", "binary"),
    "time": ("date", "timestamp", "string"),
    "whole": WHOLE,
}
_UNITS = frozenset(
    {
        "microsecond", "millisecond", "second", "minute", "hour", "day", "dayofyear", "week", "month", "quarter",
        "year",
    }
)  # fmt: skip
_TAKES = {
    "": """current_catalog current_database current_date current_schema current_timestamp current_timezone current_user
        curdate e localtimestamp monotonically_increasing_id now pi session_user spark_partition_id user uuid version
        row_number rank dense_rank percent_rank cume_dist""",
    "any": "typeof isnull isnotnull count approx_count_distinct any_value collect_list array_agg string",
    "any*": "struct",
    "string! any**": "named_struct",
    "any boolean!": "first last first_value last_value",
    "any int!": "lag lead",
    "any text": "max_by min_by",
    "text": """upper lower ucase lcase initcap ascii char_length character_length length len bit_length octet_length hex
        unhex unbase64 url_encode url_decode luhn_check is_valid_utf8 quote min max collect_set""",
    "text text": """trim ltrim rtrim btrim contains startswith endswith find_in_set regexp_like regexp_count
        regexp_substr regexp_instr instr position encode to_date try_to_date to_timestamp_ntz""",
    "text number": "left right repeat",
    "text number number": "substring substr conv",
    "text number text": "lpad rpad",
    "text text number": """split split_part substring_index regexp_extract regexp_extract_all locate levenshtein""",
    "text text text": "replace translate",
    "text text text int!": "regexp_replace",
    "text*": "concat concat_ws hash xxhash64",
    "text any*": "format_string printf",
    "text! time": "date_trunc",
    "text time": "convert_timezone",
    "string": "soundex json_array_length json_object_keys",
    "string string": "get_json_object",
    "string string!": "from_json",
    "string string string": "parse_url str_to_map",
    "bytes": "md5 sha sha1 crc32 base64 binary",
    "bytes number": "sha2",
    "bytes text": "decode/2",
    "number": """sqrt cbrt exp expm1 ln log10 log2 log1p sin cos tan asin acos atan degrees radians rint isnan factorial
        bin space zeroifnull nullifzero stddev variance date_from_unix_date""",
    "number number": "log pow power atan2 hypot shiftleft shiftright",
    "number int!": "round bround floor ceil ceiling",
    "number text": "from_unixtime",
    "number number number": "make_date",
    "number number number number number number": "make_timestamp/6",
    "number|interval": "abs negative positive sign signum sum avg mean",
    "number|boolean": "int bigint smallint tinyint float double boolean",
    "numeric": "timestamp_seconds",
    "numeric numeric": "mod pmod try_mod nanvl",
    "whole": "bit_count timestamp_millis timestamp_micros",
    "time": """year month day dayofmonth dayofweek dayofyear weekday weekofyear quarter hour minute second dayname
        monthname last_day date""",
    "number|date|timestamp": "timestamp",
    "time int": "date_add/2 date_sub dateadd/2",
    "time number": "add_months",
    "time text!": "trunc",
    "time text": "next_day date_format from_utc_timestamp to_utc_timestamp to_timestamp to_timestamp_ltz",
    "time string": "unix_timestamp to_unix_timestamp",
    "time time": "datediff/2 date_diff/2",
    "time time boolean": "months_between",
    "unit number time": "timestampadd dateadd/3 date_add/3",
    "unit time time": "timestampdiff datediff/3 date_diff/3",
    "date": "unix_date",
    "timestamp": "unix_seconds unix_millis unix_micros",
    "boolean": "bool_and bool_or every some count_if",
    "plain": "array_distinct array_max array_min",
    "plain boolean!": "sort_array",
    "plain string string": "array_join",
    "array": "array_compact array_size shuffle",
    "array number number": "slice",
    "array|map": "size cardinality",
    "array|map|struct": "to_json",
    "map": "map_keys map_values map_entries",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """What one argument may be: of these `kinds`, None for any.

    `value`: and written out; `plain`: and an array of what is not nested itself; `unit`: no value but a unit of time.
    """

    kinds: frozenset[str] | None
    value: bool = False
    plain: bool = False
    unit: bool = False

    def takes(self, argument: exp.Expr, kinds: Kinds) -> bool:
        """Whether an argument is certainly right."""
        if self.unit:
            return argument.name.lower() in _UNITS and type(argument).__name__ in ("Column", "Var")
        right = self.kinds is None or kinds.of(argument) in self.kinds
        if self.plain and kind_of_type(element_type(kinds.type(argument))) not in READ_AS_TEXTS:
            return False
        return right and (not self.value or is_value(argument))


def _taken(word: str) -> Taken:
    name = word.removesuffix("!")
    if name == "any":
        return Taken(None, value=word != name)
    if name in ("plain", "unit"):
        return Taken(frozenset({"array"} if name == "plain" else ()), plain=name == "plain", unit=name == "unit")
    kinds = {kind for part in name.split("|") for kind in _SEVERAL.get(part, (part,))}
    value = word != name
    return Taken(frozenset(kinds if value else {*kinds, "null"}), value=value)


def _signatures() -> Iterator[tuple[str, tuple[tuple[Taken, ...], int]]]:
    for text, names in _TAKES.items():
        taken = tuple(_taken(word.rstrip("*")) for word in text.split())
        yield from ((name, (taken, text.count("*"))) for name in names.split())


SIGNATURES = dict(_signatures())


def accepted(function: str, given: int) -> tuple[Taken, ...] | None:
    """Return what each of so many arguments may be; None where that is not known of the function."""
    signature = SIGNATURES.get(f"{function}/{given}") or SIGNATURES.get(function)
    if signature is None:
        return None
    taken, repeated = signature
    while repeated and len(taken) < given:
        taken += taken[-repeated:]
    return taken[:given] if given <= len(taken) else None


def is_value(node: exp.Expr) -> bool:
    """Whether an argument is written out: a literal."""
    return type(node.this if type(node).__name__ == "Neg" else node).__name__ in ("Literal", "Boolean", "Null")
