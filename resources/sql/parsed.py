"""What is known of a parsed Spark SQL expression, and Spark's functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pkgutil import get_data
from typing import NamedTuple

from dagster_adjunct.resources.lazy_modules import exp


class Taken(NamedTuple):
    """What a function takes as an argument: values of these groups of types, perhaps only
    constants.
    """

    groups: tuple[str, ...]
    is_constant: bool


class _Function(NamedTuple):
    """A function of Spark, as a line of spark_functions.txt describes it.

    `counts` are its numbers of arguments ("1", "2-3", "1+", "2,4", "?" for any), `takes` what it
    takes as its first ones, `result` the type that it always returns, None if that depends on the
    arguments or is unknown.
    """

    counts: str
    takes: tuple[Taken, ...]
    result: str | None
    kind: str


def _read_function(line: str) -> tuple[str, _Function]:
    """Return the name and the description of a function that has this line."""
    match = _LINE.fullmatch(line)
    assert match is not None, line
    takes = []
    for text in filter(None, (match["takes"] or "").split(",")):
        groups = tuple(text.removesuffix("*").split("|"))
        takes.append(Taken(groups, text.endswith("*")))
    return match["name"], _Function(
        match["counts"], tuple(takes), match["result"], match["kind"] or ""
    )


# The functions of Spark 4.3, which tests compare with Spark's own list. `get_data` also reads them
# from a zip file.
_LINE = re.compile(
    r"(?P<name>\S+) (?P<counts>\S+)(?: \((?P<takes>\S+)\))?"
    r"(?: = (?P<result>\S+))?(?: (?P<kind>\w+))?"
)
_FUNCTION_LINES = (get_data(__package__, "spark_functions.txt") or b"").decode().splitlines()
_FUNCTIONS = dict(map(_read_function, (line for line in _FUNCTION_LINES if line[0] != "#")))


ARGUMENTS = "arguments"
CALLED_AS = "called_as"
"""The marks of a node that was written as a call: its arguments, and the name of its function."""


SUBQUERY = "a subquery"
"""How the reason that only Spark can analyze an expression (`Expression.unread`) names one."""


SPARK_FUNCTIONS = frozenset(_FUNCTIONS)
"""The names of all functions of Spark SQL."""


AGGREGATE_FUNCTIONS = frozenset(
    name for name, function in _FUNCTIONS.items() if function.kind == "aggregate"
)
"""Functions that combine several records: aggregates, and window functions, which need `over
(…)`.
"""


GENERATOR_FUNCTIONS = frozenset(
    name for name, function in _FUNCTIONS.items() if function.kind == "generator"
) | {
    "variant_explode",
    "variant_explode_outer",  # in Spark these are table functions only
}
"""Functions that return several records for one."""


@dataclass(frozen=True, slots=True)
class ColumnName:
    """A reference to a column or field: ("address", "city") for `address.city`, and its position
    in the text.
    """

    parts: tuple[str, ...]
    start: int = 0

    @property
    def name(self) -> str:
        """The first part: the column."""
        return self.parts[0]

    def __str__(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class WindowClause:
    """The clause `over (partition by …)` of a window function.

    `partition_by` is the text after these words. `columns` are the plain columns in it, ("id",) in
    `id, upper(s)`.
    """

    columns: tuple[str, ...]
    partition_by: str


class Call(NamedTuple):
    """A call of a function by its plain name, in lower case.

    `arguments` is their number, None if one of them is "*". `is_word`: the name is not a keyword.
    `is_compared`: it follows "like". `is_over`: `over (…)` follows the call.
    """

    name: str
    arguments: int | None
    is_word: bool
    is_compared: bool
    is_over: bool

    @property
    def is_multi_record(self) -> bool:
        """Whether it is an aggregate or window function (of several records), or a generator
        (returns several).
        """
        return self.name in GENERATOR_FUNCTIONS or (
            self.name in AGGREGATE_FUNCTIONS and not self.is_compared
        )


class WrittenCall(NamedTuple):
    """The call of a function as it was written: the name in lower case, and the arguments."""

    name: str
    arguments: Sequence[exp.Expr]


def written_call(node: exp.Expr) -> WrittenCall | None:
    """Return the call that a node was written as; None for another node, and for functions that
    have a syntax of their own.
    """
    if isinstance(node, exp.Anonymous):
        return WrittenCall(node.name.lower(), node.expressions)
    if ARGUMENTS not in node.meta:
        return None
    name = node.meta.get(CALLED_AS) or node.key  # if(…) and substring(…) have no name
    return WrittenCall(name.lower(), node.meta[ARGUMENTS])


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed Spark SQL expression.

    `alias` is the name after "as". `name` is that of the resulting column, None where only Spark
    knows it or where there are several. `column` is a column that is passed on unchanged ("dest as
    faa" passes on dest). `columns` are the columns that it references, without the variables of
    lambdas. `star` says that it is "*", without the columns in `excepted`.

    `unread` says why it could not be parsed, in which case only Spark can check it. `mistake` is an
    error that Spark is certain to raise, whatever columns there are. `number` distinguishes the
    expressions of one SELECT, whose `text` is the whole SELECT.
    """

    text: str
    alias: str | None = None
    name: str | None = None
    column: str | None = None
    columns: tuple[ColumnName, ...] = ()
    star: bool = False
    excepted: tuple[str, ...] = ()
    unread: str = ""
    mistake: str = ""
    number: int = 0
    tree: exp.Expr | None = field(default=None, compare=False, repr=False)
    """The syntax tree without the alias. It is shared: don't change it."""

    def expand_star(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Return those of these columns that the expression "*" or "* except (…)" selects."""
        excepted = {name.lower() for name in self.excepted}
        return tuple(name for name in columns if name.lower() not in excepted)

    def place(self, name: ColumnName) -> str:
        """Return the position of a column for messages (" in line 2"), "" for a text of one
        line.
        """
        if "\n" in self.text.strip():
            return f" in line {self.text.count(chr(10), 0, name.start) + 1}"
        return ""


# The names of functions that get a unit as the first of three arguments, as in dateadd(DAY, 1, d).
_WITH_UNIT = {
    **dict.fromkeys(("dateadd", "date_add"), "timestampadd"),
    **dict.fromkeys(("datediff", "date_diff"), "timestampdiff"),
}


def taken_arguments(function: str, given: int) -> tuple[Taken, ...]:
    """Return what a function takes as each of its arguments, if it gets this number of them; fewer
    where the others may be anything, none for an unknown function.
    """
    if given == 3:
        function = _WITH_UNIT.get(function, function)
    described = _FUNCTIONS.get(function)
    if described is None or not described.takes:
        return ()
    takes = described.takes
    if described.counts.endswith("+"):
        return takes + takes[-1:] * (given - len(takes))
    if described.counts == "?" and given > len(takes):
        return ()
    return takes


def constant_result_type(function: str, given: int) -> str | None:
    """Return the type that a function always returns if it gets this number of arguments, None if
    that depends on the arguments or is unknown.
    """
    described = _FUNCTIONS.get(function)
    if described is None or (described.counts == "?" and given > len(described.takes)):
        return None
    return described.result


def argument_count_problem(function: str, given: int | None) -> str:
    """Return "upper() takes 1 argument, and gets 2"; "" if this number is allowed or can't be
    checked.
    """
    if given is None or function not in _FUNCTIONS or _FUNCTIONS[function].counts == "?":
        return ""
    allowed = _FUNCTIONS[function].counts
    least, _, most = allowed.partition("-")
    if allowed.endswith("+"):
        least = allowed[:-1]
        is_allowed = given >= int(least)
        allowed = f"{least} or more"
    elif most:
        is_allowed = int(least) <= given <= int(most)
        allowed = f"{least} to {most}"
    else:
        is_allowed = str(given) in allowed.split(",")
        allowed = allowed.replace(",", " or ")
    if is_allowed:
        return ""
    return f"{function}() takes {allowed} argument{'' if allowed == '1' else 's'}, and gets {given}"
