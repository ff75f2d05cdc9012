"""What is valid for Spark's parser without asking it: the parser accepts all of it, also of
texts that are damaged.
"""

from __future__ import annotations

import re
import shutil
from random import Random

import pytest

from dagster_adjunct.resources.spark.session import syntax_errors
from dagster_adjunct.resources.sql.arrow_expressions import is_valid_for_spark
from tests.resources.sql.drawn_expressions import Drawn

USUAL = [
    "quantity * price as amount",
    "amount is not null",
    "n + 1 > 2 and k like 'a%'",
    "case when n > 1 then 'x' else 'y' end as size",
    "cast(n as decimal(10,2)) as m",
    "coalesce(a, 'none')",
    "k in ('a', 'b') or not (n between 1 and 2)",
    "upper(concat(a, b)) as c",
    "(a + b) * -c / 2.5",
    "substring(k, 1, 2)",
    "`a b` = 'c'",
]
LEFT_TO_SPARK = [
    "n >",
    "n > > 1",
    "n in ()",
    "n is nul",
    "case when n then 1 as x",
    "n as 1",
    "cast(n as inttt)",
    "nofn(n)",
    "date '2026-13-01'",
    "n >>> 1",
    "transform(a, x -> x)",
    "99999999999999999999",
    "sum(n) over (",
    "a b c",
    "",
    "is not null",
    "amount -is not null",
    "cast(n as decimal(10,12))",
    "case when n > 1 'x' end",
    "(a as int)",
    "substring(k from for 2)",
]
TOKENS = ["and", "(", ")", ",", " as ", "not ", "'", "=", "-", "null", " x ", "1", "."]


@pytest.mark.parametrize("text", USUAL)
def test_usual_expressions_need_no_parser_of_sparks(text: str) -> None:
    assert is_valid_for_spark(text)


@pytest.mark.parametrize("text", LEFT_TO_SPARK)
def test_what_is_not_certain_is_left_to_spark(text: str) -> None:
    assert not is_valid_for_spark(text)


def damaged(random: Random, text: str) -> str:
    """Return the text with one or two of its tokens left out, twice, elsewhere, or of another
    text.
    """
    tokens = re.findall(r"\w+|\s+|'[^']*'|[^\w\s]", text)
    for _ in range(random.randint(1, 2)):
        at = random.randrange(len(tokens) + 1)
        kind = random.randrange(4)
        if kind == 0:
            del tokens[at : at + 1]
        elif kind == 1:
            tokens[at:at] = tokens[at : at + 1]
        elif kind == 2:
            random.shuffle(tokens)
        else:
            tokens[at:at] = [random.choice(TOKENS)]
    return "".join(tokens)


@pytest.mark.slow
def test_sparks_parser_accepts_what_is_declared_to_be_valid() -> None:
    if shutil.which("java") is None:
        pytest.skip("Spark's parser needs Java")
    random, drawn = Random(9), Drawn(9)
    texts = [*USUAL, *(drawn.expression() for _ in range(3_000))]
    texts += [damaged(random, random.choice(each)) for each in (texts, USUAL) for _ in range(5_000)]
    valid = [text for text in dict.fromkeys(texts) if is_valid_for_spark(text)]
    assert len(valid) > 500
    mistakes = syntax_errors([(text, False) for text in valid])
    assert [(text, mistake) for text, mistake in zip(valid, mistakes, strict=True) if mistake] == []
