"""Formats of change streams, extractors, dead letters, compaction of deltas and watermarks, for
unbounded datasets.
"""

from dagster_adjunct.assets.declaration.change_formats import ArrowChangeFormat as ArrowChangeFormat
from dagster_adjunct.assets.declaration.change_formats import ChangeFormat as ChangeFormat
from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped as DebeziumUnwrapped
from dagster_adjunct.assets.declaration.change_formats import OperationColumn as OperationColumn
from dagster_adjunct.assets.declaration.change_formats import Upserts as Upserts
from dagster_adjunct.assets.declaration.dataset import BY_OFFSET as BY_OFFSET
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope as DebeziumEnvelope
from dagster_adjunct.assets.declaration.envelopes import MaxwellEnvelope as MaxwellEnvelope
from dagster_adjunct.assets.declaration.extractors import KeyValueExtractor as KeyValueExtractor
from dagster_adjunct.assets.declaration.extractors import Projection as Projection
from dagster_adjunct.assets.declaration.extractors import PythonExtractor as PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters as DeadLetters
from dagster_adjunct.assets.declaration.policies import DeltaCompaction as DeltaCompaction
from dagster_adjunct.assets.declaration.policies import Watermark as Watermark
