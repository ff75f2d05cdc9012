"""Windows of time: their kinds, and what is computed of the records in them."""

from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregate as Aggregate
from dagster_adjunct.orchestration.operators.windows.aggregates import Count as Count
from dagster_adjunct.orchestration.operators.windows.aggregates import Distinct as Distinct
from dagster_adjunct.orchestration.operators.windows.aggregates import Max as Max
from dagster_adjunct.orchestration.operators.windows.aggregates import Mean as Mean
from dagster_adjunct.orchestration.operators.windows.aggregates import Min as Min
from dagster_adjunct.orchestration.operators.windows.aggregates import Sum as Sum
from dagster_adjunct.orchestration.operators.windows.kinds import Session as Session
from dagster_adjunct.orchestration.operators.windows.kinds import Sliding as Sliding
from dagster_adjunct.orchestration.operators.windows.kinds import Tumbling as Tumbling
