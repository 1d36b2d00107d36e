"""``dspark --help`` and ``dspark VERB --help``, written from the declarations in the configs."""

import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any, get_args

from train.config import VERBS, PipelineConfig, Verb, to_plain

_WIDTH = 98


def verbs_help() -> str:
    """What the command does, verb by verb."""
    lines = [
        "dspark trains draft models for speculative decoding.",
        "",
        "usage: dspark VERB [group=option ...] [key=value ...]",
        "",
    ]
    lines += [f"  {name:<11} {verb.summary}" for name, verb in VERBS.items()]
    lines += [
        "",
        "All verbs of a run share its folder outputs/<run.name>; each goes on where it stopped.",
        "'dspark VERB --help' lists the verb's groups and keys.",
    ]
    return "\n".join(lines) + "\n"


def verb_help(verb: str) -> str:
    """Usage, groups and every key that the verb reads, with type, default and meaning."""
    spec = VERBS[verb]
    lines = [
        spec.summary,
        "",
        f"usage: dspark {verb} [group=option ...] [key=value ...]",
        f"   eg: {spec.example}",
        "",
        "groups (choose a preset, then override keys):",
    ]
    groups = {group: group_options(group) for group in (*spec.groups, "experiment")}
    lines += [f"  {name + '=':<12} {', '.join(found)}" for name, found in groups.items() if found]
    lines += ["", "keys:"]
    for field in fields(PipelineConfig):
        if spec.reads_key(field.name):
            lines += _field_help(field, "", spec)
    lines += ["", "Add '--cfg job' to print the composed configuration without running."]
    return "\n".join(lines) + "\n"


def group_options(group: str) -> list[str]:
    """Names of the presets of a group."""
    folder = files("configs").joinpath(group)
    if not folder.is_dir():
        return []
    return sorted(
        p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")
    )


@cache
def known_keys() -> dict[str, str]:
    """Every key with its type and documentation."""
    keys: dict[str, str] = {}
    for field in fields(PipelineConfig):
        if isinstance(field.type, type) and is_dataclass(field.type):
            inner = {f"{field.name}.{f.name}": f for f in fields(field.type)}
        else:
            inner = {field.name: field}
        keys |= {name: f"({_type_name(f.type)}) {_doc(f)}" for name, f in inner.items()}
    return keys


def _field_help(field: "Field[Any]", prefix: str, spec: Verb) -> list[str]:
    if isinstance(field.type, type) and is_dataclass(field.type):
        lines = [f"  {field.name}: {(field.type.__doc__ or '').splitlines()[0]}"]
        for inner in fields(field.type):
            if spec.reads_key(f"{field.name}.{inner.name}"):
                lines += _field_help(inner, f"{field.name}.", spec)
        return lines
    text = textwrap.wrap(_doc(field), _WIDTH - 8)
    head = f"    {prefix}{field.name}={_default(field)}  ({_type_name(field.type)})"
    return [head, *[f"        {line}" for line in text]]


def _doc(field: "Field[Any]") -> str:
    return str(field.metadata.get("doc", ""))


def _default(field: "Field[Any]") -> str:
    value = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        value = field.default_factory()
    plain = to_plain(value)
    if isinstance(plain, list):
        return "[" + ",".join(map(str, plain)) + "]"
    return "null" if plain is None else str(plain)


def _type_name(kind: Any) -> str:  # noqa: ANN401 - any annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    if args := get_args(kind):
        names = [_type_name(a) for a in args]
        return f"list of {names[0]}" if str(kind).startswith("list") else " | ".join(names)
    return "null" if kind is type(None) else str(getattr(kind, "__name__", kind))
