"""All errors that Adjunct raises on purpose. `dagster_adjunct.resources.errors` draws them as
one tree.
"""

from dagster_adjunct.resources.errors import AdjunctError as AdjunctError
from dagster_adjunct.resources.errors import ApplicationBusyError as ApplicationBusyError
from dagster_adjunct.resources.errors import BadChangeError as BadChangeError
from dagster_adjunct.resources.errors import BatchTooLargeError as BatchTooLargeError
from dagster_adjunct.resources.errors import CommitConflictError as CommitConflictError
from dagster_adjunct.resources.errors import CommitStateUnknownError as CommitStateUnknownError
from dagster_adjunct.resources.errors import ComponentError as ComponentError
from dagster_adjunct.resources.errors import (
    ConditionalWritesUnsupportedError as ConditionalWritesUnsupportedError,
)
from dagster_adjunct.resources.errors import ConditionsNotMetError as ConditionsNotMetError
from dagster_adjunct.resources.errors import ConfigurationError as ConfigurationError
from dagster_adjunct.resources.errors import DatasetError as DatasetError
from dagster_adjunct.resources.errors import DatasetNotFoundError as DatasetNotFoundError
from dagster_adjunct.resources.errors import EmptyVersionError as EmptyVersionError
from dagster_adjunct.resources.errors import ExpectationError as ExpectationError
from dagster_adjunct.resources.errors import InvalidNameError as InvalidNameError
from dagster_adjunct.resources.errors import IteratorStateError as IteratorStateError
from dagster_adjunct.resources.errors import KeyOrderError as KeyOrderError
from dagster_adjunct.resources.errors import KeyTooLongError as KeyTooLongError
from dagster_adjunct.resources.errors import KeyValueTableError as KeyValueTableError
from dagster_adjunct.resources.errors import KeyValueTableExistsError as KeyValueTableExistsError
from dagster_adjunct.resources.errors import (
    KeyValueTableNotFoundError as KeyValueTableNotFoundError,
)
from dagster_adjunct.resources.errors import KeyValueTableSealedError as KeyValueTableSealedError
from dagster_adjunct.resources.errors import LakeNotFoundError as LakeNotFoundError
from dagster_adjunct.resources.errors import LeaseLostError as LeaseLostError
from dagster_adjunct.resources.errors import MalformedDocumentError as MalformedDocumentError
from dagster_adjunct.resources.errors import ManifestMismatchError as ManifestMismatchError
from dagster_adjunct.resources.errors import MarkerConflictError as MarkerConflictError
from dagster_adjunct.resources.errors import NoSealedVersionError as NoSealedVersionError
from dagster_adjunct.resources.errors import NullKeyError as NullKeyError
from dagster_adjunct.resources.errors import ObjectExistsError as ObjectExistsError
from dagster_adjunct.resources.errors import ObjectNotFoundError as ObjectNotFoundError
from dagster_adjunct.resources.errors import OffsetOutOfRangeError as OffsetOutOfRangeError
from dagster_adjunct.resources.errors import OperatorFailedError as OperatorFailedError
from dagster_adjunct.resources.errors import OutcomeUnknownError as OutcomeUnknownError
from dagster_adjunct.resources.errors import (
    PartitionCountMismatchError as PartitionCountMismatchError,
)
from dagster_adjunct.resources.errors import PermanentError as PermanentError
from dagster_adjunct.resources.errors import PlanningError as PlanningError
from dagster_adjunct.resources.errors import PreconditionFailedError as PreconditionFailedError
from dagster_adjunct.resources.errors import ProducerConflictError as ProducerConflictError
from dagster_adjunct.resources.errors import RecordNotFoundError as RecordNotFoundError
from dagster_adjunct.resources.errors import RestatementError as RestatementError
from dagster_adjunct.resources.errors import RunLeaseLostError as RunLeaseLostError
from dagster_adjunct.resources.errors import SchemaMismatchError as SchemaMismatchError
from dagster_adjunct.resources.errors import ScopeNotEmptyError as ScopeNotEmptyError
from dagster_adjunct.resources.errors import ScopeNotFoundError as ScopeNotFoundError
from dagster_adjunct.resources.errors import SerializationError as SerializationError
from dagster_adjunct.resources.errors import SourceChangedError as SourceChangedError
from dagster_adjunct.resources.errors import StaleDatasetError as StaleDatasetError
from dagster_adjunct.resources.errors import StillReadError as StillReadError
from dagster_adjunct.resources.errors import StoreUnavailableError as StoreUnavailableError
from dagster_adjunct.resources.errors import StreamExistsError as StreamExistsError
from dagster_adjunct.resources.errors import StreamNotFoundError as StreamNotFoundError
from dagster_adjunct.resources.errors import StreamReadError as StreamReadError
from dagster_adjunct.resources.errors import StreamUnavailableError as StreamUnavailableError
from dagster_adjunct.resources.errors import TableAccessError as TableAccessError
from dagster_adjunct.resources.errors import TableError as TableError
from dagster_adjunct.resources.errors import TableNotFoundError as TableNotFoundError
from dagster_adjunct.resources.errors import TableReplacedError as TableReplacedError
from dagster_adjunct.resources.errors import TableUnavailableError as TableUnavailableError
from dagster_adjunct.resources.errors import TransientError as TransientError
from dagster_adjunct.resources.errors import ValidatorError as ValidatorError
from dagster_adjunct.resources.errors import ValueTooLongError as ValueTooLongError
from dagster_adjunct.resources.errors import VersionDiscardedError as VersionDiscardedError
from dagster_adjunct.resources.errors import ZoneRulesError as ZoneRulesError
