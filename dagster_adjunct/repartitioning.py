"""Change the number of partitions of existing streams and datasets."""

from dagster_adjunct.assets.rebucketing import RebucketReport as RebucketReport
from dagster_adjunct.orchestration.maintenance.repartition import (
    RepartitionReport as RepartitionReport,
)
from dagster_adjunct.orchestration.maintenance.repartition import (
    repartition_dataset as repartition_dataset,
)
from dagster_adjunct.orchestration.maintenance.repartition import (
    repartition_stream as repartition_stream,
)
