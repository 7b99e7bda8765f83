"""Settings models, and how to walk a tree of them.

`Closed` makes a plain frozen dataclass a section: a pydantic model with the same fields rejects unknown keys
and wrong types, then the dataclass runs its own checks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core import PydanticCustomError, PydanticUndefined, core_schema, to_jsonable_python

from rollgym.core.errors import RollgymError

T = TypeVar("T")
Model = type[BaseModel]


@dataclasses.dataclass(frozen=True)
class Renames:
    """Keys and values that a release renamed, for error messages."""

    since: str = ""
    """The release that renamed them."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Old dotted key -> new dotted key; a section renames all keys below it."""
    values: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
    """New dotted key -> old value -> new value."""

    def new_key(self, key: str) -> str | None:
        """Return the new name of an old key; ``None`` if the key was not renamed."""
        head, tail = key, ""
        while head not in self.keys:
            head, dot, last = head.rpartition(".")
            if not dot:
                return None
            tail = f".{last}{tail}"
        return self.keys[head] + tail

    def new_value(self, key: str, value: Any) -> tuple[Any] | None:
        """Return the new form of an old value of a (new) key as a 1-tuple; ``None`` if not renamed."""
        for old, new in self.values.get(key, {}).items():
            if type(old) is type(value) and old == value:
                return (new,)
        return None


class Settings(BaseModel):
    """A section of a config: frozen, strict about types, and without unknown keys.

    Example:
        >>> class Stop(Settings):
        ...     steps: int = 100
        >>> load(Stop, overrides=["steps=5"])
        Stop(steps=5)
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )
    shipped_in: ClassVar[str] = ""
    """Package whose folder ``configs`` holds files that others can extend by name."""
    renames: ClassVar[Renames] = Renames()
    """Old keys and values, which errors translate to the new ones; read on the root model only."""

    def check(self) -> None:
        """Check settings against each other; override and raise `UsageError`. Fields are already valid."""

    @classmethod
    def reading(cls, values: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``values`` from a file are validated; override where needed."""
        return contextlib.nullcontext()

    @model_validator(mode="after")
    def _checked(self) -> typing.Self:
        with _as_message():
            self.check()
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            _refuse_open(f"{cls.__name__}.{name}", field.annotation, any(_closes(m) for m in field.metadata))


@contextlib.contextmanager
def _as_message() -> Iterator[None]:
    """Report a rollgym error raised inside a validator under the key being validated."""
    try:
        yield
    except RollgymError as error:
        raise PydanticCustomError("rollgym", "{message}", {"message": str(error)}) from error


class _Mirror(Settings):
    """A pydantic model with the fields of a dataclass."""

    model_config = ConfigDict(from_attributes=True)  # instances are validated too
    source: ClassVar[type]

    def built(self) -> Any:
        """Build the dataclass, which runs its own checks."""
        with _as_message():
            return self.source(**{name: getattr(self, name) for name in type(self).model_fields})


class _Closed:
    """Annotation that marks a dataclass as a section without unknown keys."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            _Mirror.built,
            handler.generate_schema(mirror(source)),
            serialization=core_schema.plain_serializer_function_ser_schema(_opened),
        )


Closed = Annotated[T, _Closed()]
"""``Closed[SomeDataclass]``: a plain dataclass as a section; unknown keys are refused."""


def _opened(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _closes(mark: Any) -> bool:
    return isinstance(mark, _Closed)


def _refuse_open(name: str, annotation: Any, closed: bool = False) -> None:
    """Raise `TypeError` for a section that would ignore unknown keys: an error of the model's author."""
    if dataclasses.is_dataclass(annotation) and not closed:
        raise TypeError(f"{name}: write Closed[{getattr(annotation, '__name__', annotation)}]")
    if is_model(annotation) and annotation.model_config.get("extra") != "forbid":
        raise TypeError(f"{name}: {annotation.__name__} must be derived from Settings")
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    for inner in get_args(annotation):
        _refuse_open(name, inner, any(_closes(mark) for mark in marks))


@functools.cache
def mirror(source: type) -> type[_Mirror]:
    """Return a pydantic model with the fields, defaults and descriptions of a dataclass."""
    hints = typing.get_type_hints(source, include_extras=True)
    docstrings = _docstrings(source)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        if field.init:
            default: dict[str, Any] = {"default": ...}
            if field.default_factory is not dataclasses.MISSING:
                default = {"default_factory": field.default_factory}
            elif field.default is not dataclasses.MISSING:
                default = {"default": field.default}
            fields[field.name] = (
                _closed(hints[field.name]),
                Field(**default, description=docstrings.get(field.name)),
            )
    model = create_model(
        source.__name__, __base__=_Mirror, __doc__=source.__doc__, __module__=source.__module__, **fields
    )
    model.source = source
    return model


def _closed(hint: Any) -> Any:
    """Mark every dataclass in a type hint as `Closed`."""
    if dataclasses.is_dataclass(hint):
        return Annotated[hint, _Closed()]
    inner = tuple(_closed(part) for part in get_args(hint))
    if inner == get_args(hint):
        return hint
    if get_origin(hint) in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007
    return get_origin(hint)[inner]


def _docstrings(source: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass."""
    docstrings: dict[str, str] = {}
    for cls in reversed(source.__mro__[:-1]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError):
            continue
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value.value if _is_text(below) else ""  # type: ignore[attr-defined]
                if text:
                    docstrings[field.target.id] = " ".join(text.split())
    return docstrings


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_model(annotation: Any) -> typing.TypeGuard[Model]:
    """Return whether a type is a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def models_in(annotation: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Model]]:
    """Yield the sections within a type and the steps to them: ``N`` into a list, ``KEY`` into a mapping."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        yield steps, mirror(typing.cast(type, annotation))
    elif is_model(annotation):
        yield steps, annotation
    elif origin is Annotated:
        yield from models_in(inner[0], steps)
    elif origin in (Union, types.UnionType):
        for member in inner:
            yield from models_in(member, steps)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from models_in(inner[1], (*steps, "KEY"))
    elif isinstance(origin, type) and issubclass(origin, Collection):
        for member in dict.fromkeys(inner):
            yield from models_in(member, (*steps, "N"))


def inside(annotation: Any, step: str | int) -> Any:
    """Return the type one step below a section, list or mapping; ``None`` if there is none."""
    if is_model(annotation):
        field = annotation.model_fields.get(str(step))
        return field.annotation if field else None
    inner = [member for member in get_args(annotation) if member is not Ellipsis]
    if isinstance(step, int) and len(inner) > 1:
        return inner[min(step, len(inner) - 1)]
    return inner[-1] if inner else None


def alternatives(annotation: Any, value: Any) -> list[Any]:
    """Return the members of a union type, without those that ``value`` rules out."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0], value)
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in alternatives(part, value)]
    if dataclasses.is_dataclass(annotation):
        return [mirror(typing.cast(type, annotation))]
    if is_model(annotation) and isinstance(value, dict):
        tag = tag_of(annotation)
        if tag and value.get(tag[0], tag[1]) != tag[1]:
            return []
    return [annotation]


def holds(model: Model, value: Any) -> bool:
    """Return whether a value is an instance of a section."""
    return isinstance(value, model.source if issubclass(model, _Mirror) else model)


def tag_of(model: Model) -> tuple[str, str] | None:
    """Return the discriminator field of a section and its value; ``None`` if it has none."""
    for name, field in model.model_fields.items():
        literals = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(literals) == 1:
            return name, str(literals[0])
    return None


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types; infinity is kept."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else to_jsonable_python(value)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key of a config."""

    key: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    """``PydanticUndefined`` if the key is required."""
    description: str
    only_with: str
    """Such as ``kind: sgd`` if the key exists only in that alternative of a section."""


def entries(
    model: Model, prefix: str = "", whole: Any = None, only_with: str = "", above: tuple[Model, ...] = ()
) -> Iterator[Entry]:
    """Yield every key below a model by its dotted name; ``whole`` is the section's default, if it has one."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        default = getattr(whole, name, PydanticUndefined) if whole is not None else default_of(field)
        sections = list(models_in(field.annotation))
        section = (sections[0][1].__doc__ or "").partition("\n\n")[0] if len(sections) == 1 else ""
        docstring = field.description or section
        text = " ".join(docstring.replace("``", "").split())
        yield Entry(key, field.annotation, tuple(field.metadata), default, text, only_with)
        for steps, inner in sections:
            if inner in (*above, model):
                continue
            tag = tag_of(inner) if len(sections) > 1 else None
            own = default if not steps and holds(inner, default) else None
            only = ": ".join(tag) if tag else only_with
            yield from entries(inner, ".".join((key, *steps, "")), own, only, (*above, model))


def default_of(field: Any) -> Any:
    """Return a field's default, ``PydanticUndefined`` if it has none."""
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return PydanticUndefined
    return field.get_default(call_default_factory=True)
