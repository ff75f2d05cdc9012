"""Writes the signatures of public calls into the pages that explain them.

A page names them in a comment; what follows, up to the next comment, is written from the code:

    <!-- signatures: dagster_adjunct.sources.FileSource dagster_adjunct.sources.QuerySource -->
    <!-- end of signatures -->

Each has the first sentence of its docstring. To write all pages anew:

    python -m docs.hooks.page_signatures
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_SECTION = re.compile(
    r"(?P<begin><!-- signatures: (?P<names>[^>]+?) -->\n)"
    r".*?(?P<end><!-- end of signatures -->)",
    re.DOTALL,
)
_COLUMNS = 100


def names_on(page: str) -> Iterator[str]:
    """Yield the full names of the calls whose signatures a page has."""
    for section in _SECTION.finditer(page):
        yield from section["names"].split()


def with_signatures(page: str) -> str:
    """Return the text of a page with the signatures as they are in the code."""
    return _SECTION.sub(
        lambda section: section["begin"] + describe(section["names"].split()) + section["end"], page
    )


def describe(names: list[str]) -> str:
    """Return the signatures of these calls, in one block of code for each module."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(_module(name), []).append(name)
    return "\n".join(
        f"```py\n# {module}\n\n" + "\n".join(_entry(module, name) for name in own) + "```\n"
        for module, own in modules.items()
    )


def find(name: str) -> Callable[..., object]:
    """Return the function, class or method of a name like `dagster_adjunct.Application.table`."""
    found: object = importlib.import_module(_module(name))
    for part in name.removeprefix(_module(name) + ".").split("."):
        found = getattr(found, part)
    if not callable(found):
        raise LookupError(f"{name} can't be called, so that it has no signature.")
    return found


def _module(name: str) -> str:
    """Return the public module of a full name."""
    package, first, *_ = name.split(".")
    is_module = (DOCS.parent / package / f"{first}.py").exists()
    return f"{package}.{first}" if is_module else package


def _entry(module: str, name: str) -> str:
    return f"{_signature(module, name)}\n{_description(name)}\n"


def _signature(module: str, name: str) -> str:
    called = find(name)
    rebuild = getattr(called, "model_rebuild", None)  # of a model of pydantic
    if rebuild is not None:
        rebuild()  # before that, its parameters are unknown
    signature = inspect.signature(called)
    # Of a method, `self` is left out: its class stands before it.
    given = [each for each in signature.parameters.values() if each.name not in {"self", "cls"}]
    shown = [_parameter(each) for each in given]
    keyword = [each.kind is inspect.Parameter.KEYWORD_ONLY for each in given]
    has_rest = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in given)
    if True in keyword and not has_rest:
        shown.insert(keyword.index(True), "*")
    result = "" if inspect.isclass(called) else f" -> {_annotation(signature.return_annotation)}"
    short = name.removeprefix(f"{module}.")
    line = f"{short}({', '.join(shown)}){result}"
    if len(line) <= _COLUMNS:
        return line
    return "\n".join([f"{short}(", *(f"    {each}," for each in shown), f"){result}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _annotation(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    checked = re.sub(r"\bSkipValidation\[(.*?)\]$", r"\1", text)
    return re.sub(r"\b(?:dt|datetime|pa|typing|dg|sensors)\.", "", checked).replace("'", '"')


def _default(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__
    if isinstance(value, timedelta):
        return _duration(value)
    text = repr(value)
    return "..." if text.startswith("<") else text.replace("'", '"')


def _duration(value: timedelta) -> str:
    for unit in (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)):
        if value and not value % unit:
            name = {86_400: "days", 3_600: "hours", 60: "minutes"}[int(unit.total_seconds())]
            return f"timedelta({name}={value // unit})"
    return f"timedelta(seconds={value.total_seconds():g})"


def _description(name: str) -> str:
    paragraph = (inspect.getdoc(find(name)) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(paragraph.split()), maxsplit=1)[0]
    words, lines = sentence.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= _COLUMNS - 6:
            lines.append("")
        lines[-1] += f" {word}"
    return "\n".join(f"    #{line}" for line in lines)


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(with_signatures(path.read_text(encoding="utf-8")), encoding="utf-8")
