"""The base of all settings, and how a tree of them is walked.

`Closed` lets plain frozen dataclasses be sections: for each there is a model of the same fields, which finds
unknown keys and wrong types; the dataclass then makes its own checks.
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

from rollgym.errors import RollgymError

T = TypeVar("T")
Model = type[BaseModel]


class Settings(BaseModel):
    """A section of the configuration: closed, frozen, strict about types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def check(self) -> None:
        """Override to check settings against each other; raise `UsageError`. Fields are valid already."""

    @classmethod
    def reading(cls, values: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Override for what must hold while ``values`` from a file are validated as this model."""
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
    """Make a rollgym error inside a validator the message of its key."""
    try:
        yield
    except RollgymError as error:
        raise PydanticCustomError("rollgym", "{message}", {"message": str(error)}) from error


class _Mirror(Settings):
    """A dataclass as settings."""

    model_config = ConfigDict(from_attributes=True)  # instances are validated too
    source: ClassVar[type]

    def built(self) -> Any:
        """The dataclass, after its own checks."""
        with _as_message():
            return self.source(**{name: getattr(self, name) for name in type(self).model_fields})


class _Closed:
    """Marks a dataclass that is read strictly."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            _Mirror.built,
            handler.generate_schema(mirror(source)),
            serialization=core_schema.plain_serializer_function_ser_schema(_opened),
        )


Closed = Annotated[T, _Closed()]
"""``Closed[SomeDataclass]``: a section that is a plain dataclass, with unknown keys refused."""


def _opened(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _closes(mark: Any) -> bool:
    return isinstance(mark, _Closed)


def _refuse_open(name: str, annotation: Any, closed: bool = False) -> None:
    """A section that would ignore unknown keys is a mistake of the model's author."""
    if dataclasses.is_dataclass(annotation) and not closed:
        raise TypeError(f"{name}: write Closed[{getattr(annotation, '__name__', annotation)}]")
    if is_model(annotation) and annotation.model_config.get("extra") != "forbid":
        raise TypeError(f"{name}: {annotation.__name__} must be derived from Settings")
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    for inner in get_args(annotation):
        _refuse_open(name, inner, any(_closes(mark) for mark in marks))


@functools.cache
def mirror(source: type) -> type[_Mirror]:
    """The model that has the fields, defaults and descriptions of a dataclass."""
    hints = typing.get_type_hints(source, include_extras=True)
    said = _docstrings(source)
    wanted: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        if field.init:
            default: dict[str, Any] = {"default": ...}
            if field.default_factory is not dataclasses.MISSING:
                default = {"default_factory": field.default_factory}
            elif field.default is not dataclasses.MISSING:
                default = {"default": field.default}
            wanted[field.name] = (
                _closed(hints[field.name]),
                Field(**default, description=said.get(field.name)),
            )
    made = create_model(
        source.__name__, __base__=_Mirror, __doc__=source.__doc__, __module__=source.__module__, **wanted
    )
    made.source = source
    return made


def _closed(hint: Any) -> Any:
    """A type hint in which every dataclass is closed."""
    if dataclasses.is_dataclass(hint):
        return Annotated[hint, _Closed()]
    inner = tuple(_closed(part) for part in get_args(hint))
    if inner == get_args(hint):
        return hint
    if get_origin(hint) in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007
    return get_origin(hint)[inner]


def _docstrings(source: type) -> dict[str, str]:
    """What stands below each field of a dataclass."""
    found: dict[str, str] = {}
    for one in reversed(source.__mro__[:-1]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError, SyntaxError):
            continue
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value.value if _is_text(below) else ""  # type: ignore[attr-defined]
                if text:
                    found[field.target.id] = " ".join(text.split())
    return found


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_model(annotation: Any) -> typing.TypeGuard[Model]:
    """Whether a type is a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def models_in(annotation: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Model]]:
    """The sections within a type, and the steps to them: ``N`` into a list, ``KEY`` into a mapping."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        yield steps, mirror(typing.cast(type, annotation))
    elif is_model(annotation):
        yield steps, annotation
    elif origin is Annotated:
        yield from models_in(inner[0], steps)
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from models_in(one, steps)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from models_in(inner[1], (*steps, "KEY"))
    elif isinstance(origin, type) and issubclass(origin, Collection):
        for one in dict.fromkeys(inner):
            yield from models_in(one, (*steps, "N"))


def inside(annotation: Any, step: str | int) -> Any:
    """The type below a section, list or mapping; ``None`` where there is nothing."""
    if is_model(annotation):
        field = annotation.model_fields.get(str(step))
        return field.annotation if field else None
    inner = [one for one in get_args(annotation) if one is not Ellipsis]
    if isinstance(step, int) and len(inner) > 1:
        return inner[min(step, len(inner) - 1)]
    return inner[-1] if inner else None


def alternatives(annotation: Any, value: Any) -> list[Any]:
    """The members of a type's unions, without those that what is written rules out."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0], value)
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for part in get_args(annotation) for one in alternatives(part, value)]
    if dataclasses.is_dataclass(annotation):
        return [mirror(typing.cast(type, annotation))]
    if is_model(annotation) and isinstance(value, dict):
        tag = tag_of(annotation)
        if tag and value.get(tag[0], tag[1]) != tag[1]:
            return []
    return [annotation]


def holds(model: Model, value: Any) -> bool:
    """Whether a value is what a section becomes."""
    return isinstance(value, model.source if issubclass(model, _Mirror) else model)


def tag_of(model: Model) -> tuple[str, str] | None:
    """The field that tells a section from its alternatives, and its word for this one."""
    for name, field in model.model_fields.items():
        words = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(words) == 1:
            return name, str(words[0])
    return None


def jsonable(value: Any) -> Any:
    """A value in JSON's types; infinity stays."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else to_jsonable_python(value)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key of a configuration."""

    key: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    """``PydanticUndefined`` where it must be given."""
    description: str
    only_with: str
    """``kind: ppo`` where the key is there only then."""


def entries(
    model: Model, prefix: str = "", whole: Any = None, only_with: str = "", above: tuple[Model, ...] = ()
) -> Iterator[Entry]:
    """Every key below a model by its dotted name; ``whole`` is the section's own default, if it has one."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        default = getattr(whole, name, PydanticUndefined) if whole is not None else default_of(field)
        found = list(models_in(field.annotation))
        said = field.description or (found[0][1].__doc__ if len(found) == 1 else "") or ""
        text = " ".join(said.replace("``", "").split())
        yield Entry(key, field.annotation, tuple(field.metadata), default, text, only_with)
        for steps, inner in found:
            if inner in (*above, model):
                continue
            tag = tag_of(inner) if len(found) > 1 else None
            own = default if not steps and holds(inner, default) else None
            only = ": ".join(tag) if tag else only_with
            yield from entries(inner, ".".join((key, *steps, "")), own, only, (*above, model))


def default_of(field: Any) -> Any:
    """A field's default, ``PydanticUndefined`` where there is none."""
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return PydanticUndefined
    return field.get_default(call_default_factory=True)
