"""Calls a DataFrame function of the application, and looks at what it answers before anything is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.arguments import called, first_double
from dagster_adjunct.orchestration.operators.columns.hidden_columns import carried
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.user_code import failure_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction


def result_of(operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
    """Return what the function makes of the records.

    Raises OperatorFailedError for what the function raises, and PlanningError for an answer that is no frame, lacks the
    records' hidden columns or has two columns of one name. What Spark's analyser and Adjunct say passes as it is.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    try:
        result: object = function(frame)
    except (AdjunctError, AnalysisException):
        raise
    except Exception as error:
        raise failure_of(operator, called(function), function, error) from error
    if not isinstance(result, DataFrame):
        returned = "None" if result is None else type(result).__name__
        raise PlanningError(
            f"{operator}: {called(function)} returned {returned}: expected a DataFrame.",
            "Return the records that it was given, with other columns or fewer rows.",
            operator=operator,
        )
    lost = [name for name in carried(frame) if name not in result.columns]
    if lost:
        raise PlanningError(
            f"{operator}: its function returned records without {', '.join(lost)}, which carry each record's "
            "position in its stream and its epoch.",
            'Keep them: add columns with withColumn or select("*", …), and drop only your own; or give '
            "expressions instead of a function.",
            operator=operator,
        )
    double = first_double(result.columns)
    if double is not None:
        raise PlanningError(
            f"{operator}: {called(function)} returned two columns called {double!r}.",
            "Rename or drop one of them; Spark's names ignore case.",
            column=double,
            operator=operator,
        )
    return result
