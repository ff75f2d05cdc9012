"""What a batch has learned from outside, kept in the lake before anything that depends on it is written.

An object for each operator and turn, under (application, batch), written only where there is none: of two runs of one
batch the first one's answers count for both. They are of no use once the batch is closed, and go then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    ObjectExistsError,
    ObjectNotFoundError,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.objects import Lake

_FORMAT = 1
_ABOUT = b"adjunct"


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """The answers that one operator has got in one batch, in turns: a batch that is run again may have more to ask.

    `about` says what was asked, as JSON-able values; answers to something else are refused.
    """

    lake: Lake
    application: str
    batch: int
    operator: str
    about: dict[str, Any]

    def read(self, turn: int) -> pa.Table | None:
        """Return what was recorded in this turn, from 1 on; None where nothing is yet."""
        import pyarrow as pa

        key = self._key(turn)
        try:
            data = self.lake.store.get(key).data
        except ObjectNotFoundError:
            return None
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            about = json.loads((table.schema.metadata or {})[_ABOUT])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise MalformedDocumentError(
                f"the answers of {self.operator} in batch {self.batch} of application {self.application!r} can't be "
                f"read: {error}.",
                "Restore that object from a backup, or abandon the batch: adjunct checkpoint abandon.",
                document=key,
            ) from error
        if about != self._about:
            raise ConfigurationError(
                f"{self.operator}: batch {self.batch} of application {self.application!r} was begun by another version "
                f"of it, which asked for something else: {_shown(about)}; this one asks for {_shown(self._about)}.",
                "Let that version end the batch, then deploy this one; or abandon it: adjunct checkpoint abandon.",
                application=self.application,
                operator=self.operator,
            )
        return table

    def keep(self, turn: int, answers: pa.Table) -> pa.Table | None:
        """Record what was answered in this turn and return it; None where another run of the batch was first."""
        import pyarrow as pa

        answers = answers.replace_schema_metadata({_ABOUT: json.dumps(self._about)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, answers.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(answers)
        try:
            self.lake.store.put_if_absent(self._key(turn), sink.getvalue().to_pybytes())
        except ObjectExistsError:
            return None
        return answers

    @property
    def _about(self) -> dict[str, Any]:
        return {"format": _FORMAT, **self.about}

    def _key(self, turn: int) -> str:
        return f"{_prefix(self.lake, self.application)}{self.batch}/{self.operator}/{turn}.arrow"


def forget_answers(lake: Lake, application: str, closed: int) -> None:
    """Delete what batches up to this one have recorded: they are closed, and not run again."""
    prefix = _prefix(lake, application)
    batches = ((info.key, info.key.removeprefix(prefix).partition("/")[0]) for info in lake.store.list(prefix))
    lake.store.delete_many([key for key, batch in batches if batch.isdecimal() and int(batch) <= closed])


def _prefix(lake: Lake, application: str) -> str:
    return f"{lake.application_prefix(application)}/answers/"


def _shown(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items() if name != "format")
