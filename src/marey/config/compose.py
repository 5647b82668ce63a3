"""Hydra composes, the schema checks, and every refusal becomes one sentence that names the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, overload

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from marey.config.runs import DEFAULTS, RECIPE_GROUPS, SCHEMAS, RunConfig
from marey.config.schema import EncoderConfig, describe
from marey.core.errors import UserError, nearest

Schema = TypeVar("Schema", bound=BaseModel)
CONFIG_MODULE = "marey.conf"
DEFAULT_CONFIG = "config"
DATA_KEYS = ("name", "train", "sources", "val")
"""What says which latents a causal run reads, of which its recipes say nothing."""
GROUPS = ("data", *dict.fromkeys(RECIPE_GROUPS.values()))


def compose_container(
    overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG, config_dir: Path | None = None
) -> dict[str, Any]:
    """The composed configuration as plain values.

    Raises:
        UserError: a key, value or group that does not exist, naming the nearest one that does.
    """
    return compose_job(overrides, config_name=config_name, config_dir=config_dir).plain


class Job(NamedTuple):
    """What a command line asks for."""

    plain: dict[str, Any]
    """The composed configuration as plain values."""
    follows_run_dir: bool
    """Whether ``hydra.job.chdir`` asks to work in the run folder."""
    run_dir: str | None
    """``hydra.run.dir``, where it is known before Hydra starts a run and not made of the time."""


def compose_job(overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG, config_dir: Path | None = None) -> Job:
    """What Hydra makes of a command line, without starting a run.

    Raises:
        UserError: as :func:`compose_container`.
    """
    extra = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir.resolve()}]"]
    # A search path finds groups; a primary configuration is found only where Hydra itself starts.
    starts_there = config_dir is not None and (config_dir / f"{config_name}.yaml").is_file()
    try:
        if GlobalHydra.instance().is_initialized():
            composed = compose(config_name, overrides=[*overrides, *extra], return_hydra_config=True)
        elif config_dir is not None and starts_there:
            with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
                path = f"hydra.searchpath=[pkg://{CONFIG_MODULE}]"
                composed = compose(config_name, overrides=[*overrides, path], return_hydra_config=True)
        else:
            with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
                composed = compose(config_name, overrides=[*overrides, *extra], return_hydra_config=True)
        changes_folder = bool(composed.hydra.job.chdir)
        run_dir = _run_folder(composed)
        with open_dict(composed):
            del composed["hydra"]  # parts of it have values only in a run
        return Job(to_plain(composed), changes_folder, run_dir)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        # Hydra has the last three for overrides of its own groups that are no group, as hydra=null.
        raise UserError(explain(error, overrides, config_name=config_name)) from error


def _run_folder(composed: DictConfig) -> str | None:
    given = OmegaConf.to_container(composed.hydra.run, resolve=False)
    assert isinstance(given, dict)
    if "${now:" in str(given["dir"]):
        return None
    try:
        return str(composed.hydra.run.dir)
    except OmegaConfBaseException:  # it is made of what only a run has
        return None


def to_plain(composed: DictConfig | ListConfig) -> dict[str, Any]:
    """Resolve interpolations and turn the composition into nested dictionaries and lists."""
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(
            f"{error.full_key} has no value; give it on the command line, as in {error.full_key}=PATH"
        ) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


@overload
def validate(plain: Mapping[str, Any]) -> EncoderConfig: ...
@overload
def validate(plain: Mapping[str, Any], schema: type[Schema]) -> Schema: ...
def validate(plain: Mapping[str, Any], schema: type[BaseModel] = EncoderConfig) -> BaseModel:
    """Check the composed values against the schema of their objective.

    Raises:
        UserError: the first key that is unknown, missing or out of range, with its value and its meaning.
    """
    try:
        return schema.model_validate(dict(plain))
    except ValidationError as error:
        raise UserError(_explain_validation(error, schema)) from error


def load_config(
    overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG, config_dir: Path | None = None
) -> EncoderConfig:
    """Compose and check in one go (see :func:`compose_container` and :func:`validate`)."""
    return validate(compose_container(overrides, config_name=config_name, config_dir=config_dir))


def validate_run(plain: Mapping[str, Any]) -> RunConfig:
    """Check the composed values against the schema of the objective they name.

    Raises:
        UserError: as :func:`validate`.
    """
    return validate(plain, SCHEMAS.get(str(plain.get("objective")), EncoderConfig))


def load_run(
    overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG, config_dir: Path | None = None
) -> RunConfig:
    """Compose and check a run of any objective."""
    return validate_run(compose_container(overrides, config_name=config_name, config_dir=config_dir))


def load_recipe(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The recipe that a run started from: its objective's defaults with the recipe chosen in ``overrides`` alone.

    Data is not part of a recipe; where the defaults name none, the run's own stands there.
    """
    group = RECIPE_GROUPS[config.objective]
    chosen = [line for line in group_overrides(overrides) if line.startswith(f"{group}=")]
    plain = compose_container(chosen, config_name=DEFAULTS[config.objective])
    if config.objective == "latent_video":
        plain["data"] |= {key: value for key, value in describe(config)["data"].items() if key in DATA_KEYS}
    return validate_run(plain)


def group_overrides(overrides: Sequence[str]) -> list[str]:
    """Those of ``overrides`` that choose a recipe or a data source, and nothing else."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [line for line, item in zip(overrides, parsed, strict=True) if item.key_or_group in GROUPS]


def flatten(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values, depth first; lists are leaves."""
    for key, value in plain.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def differences(plain: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """``key: value (recipe: value)`` for every leaf that differs, in the order of the configuration."""
    theirs = dict(flatten(reference))
    absent = object()
    return [
        f"{key}={yaml_value(value)} (recipe: {yaml_value(theirs.get(key))})"
        for key, value in flatten(plain)
        if theirs.get(key, absent) != value
    ]


def yaml_value(value: Any) -> str:
    """A leaf as one would type it: ``null``, ``true``, ``[1, 2]``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    return str(value)


def suggest(key: str, known: Sequence[str]) -> str | None:
    """The valid dotted key that ``key`` most likely meant: the same leaf elsewhere, else a sibling."""
    parent, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    siblings = {name[len(parent) + 1 if parent else 0 :].split(".")[0] for name in known if _below(name, parent)}
    close = nearest(leaf, siblings)
    if close:
        return f"{parent}.{close}" if parent else close
    return same_leaf[0] if same_leaf else nearest(key, known)


def _below(name: str, parent: str) -> bool:
    return not parent or name.startswith(parent + ".")


def explain(error: Exception, overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG) -> str:
    """One sentence for a refusal of Hydra's or OmegaConf's."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}; write key=value, and quote the whole word in the shell"
    if isinstance(error, MissingConfigException):
        return _explain_missing(error, text)
    if isinstance(error, ConfigCompositionException):
        named = re.search(r"Could not (?:override|append to config|delete from config)\S* '?([\w.]+)", text)
        cause = str(error.__cause__ or "").splitlines()
        if named and "Could not override" in text and _is_unknown(named[1], config_name):
            return unknown_key(named[1], known_keys(config_name))
        if "An item is already at" in text:
            return f"{text.rstrip('.').split()[-1]} exists already: change it without the leading +"
        detail = cause[0] if cause else ""
        return f"{text.splitlines()[0].rstrip('.')}{': ' + detail if detail else ''}"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"the configuration cannot be composed from {' '.join(overrides) or 'its defaults'}: {first}"


def unknown_key(key: str, known: Sequence[str]) -> str:
    """``model.nmae is not a key of the configuration; did you mean model.name?``."""
    close = suggest(key, known)
    hint = f"did you mean {close}?" if close else "`marey train --cfg job` prints every key"
    return f"{key} is not a key of the configuration; {hint}"


def known_keys(config_name: str = DEFAULT_CONFIG) -> list[str]:
    """Every dotted leaf key of the default composition."""
    if GlobalHydra.instance().is_initialized():
        GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return [key for key, _ in flatten(to_plain(compose(config_name)))]


def _is_unknown(key: str, config_name: str) -> bool:
    try:
        known = known_keys(config_name)
    except HydraException:
        return False
    return not any(name == key or name.startswith(key + ".") for name in known)


def _explain_missing(error: MissingConfigException, text: str) -> str:
    wanted = error.missing_cfg_file or ""
    group, _, choice = wanted.rpartition("/")
    options = list(error.options or [])
    if not group or not options:
        return f"{text.splitlines()[0].rstrip('.')}; see `marey train --help` for the configurations there are"
    group = group.rsplit("/", 1)[-1]
    close = nearest(choice, options)
    hint = f"did you mean {group}={close}?" if close else f"choose one of {', '.join(options)}"
    return f"{group}={choice} does not exist; {hint}"


def _explain_validation(error: ValidationError, schema: type[BaseModel]) -> str:
    # An unknown key explains more than what follows from it; inside a union the deepest reading is the one
    # meant.
    first = min(
        error.errors(include_url=False),
        key=lambda item: (item["type"] != "extra_forbidden", -len(item["loc"])),
    )
    key = _dotted(first["loc"], schema)
    kind, value = first["type"], first.get("input")
    if kind == "extra_forbidden":
        parent, known = key.rpartition(".")[0], list(_keys(schema))
        in_list = [f"{parent}.{name}" for name in _entry_keys(schema, parent)] if parent.endswith("]") else []
        return unknown_key(key, in_list or known)
    if kind == "missing":
        return f"{key} is missing; `marey train --cfg job` shows its default"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if kind == "model_type":
        return f"{key}={yaml_value(value)} replaces a whole group of keys; set one of them, as in {key}.KEY=VALUE"
    reason = re.sub(r"^Input should be", "it must be", first["msg"]).replace("None", "null")
    meaning = _meaning(key, schema)
    return f"{key}={yaml_value(value)} is not allowed: {reason}{f' ({meaning})' if meaning else ''}"


def _dotted(location: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """The key as a person types it: without the type names that pydantic adds for unions."""
    key = ""
    current: Any = schema
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
            current = _model_in(current)
        elif isinstance(current, type) and issubclass(current, BaseModel):
            key += f".{part}" if key else part
            field = current.model_fields.get(part)
            current = field.annotation if field else None
    return key


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a list or a union of lists holds, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is None:
        return None
    return next((model for item in get_args(annotation) if (model := _model_in(item)) is not None), None)


def _entry_keys(schema: type[BaseModel], place: str) -> list[str]:
    """Keys of an entry of the list at ``place`` (``data.train[0]``)."""
    current: Any = schema
    for part in re.sub(r"\[\d+\]", "", place).split("."):
        model = _model_in(current)
        field = model.model_fields.get(part) if model else None
        current = field.annotation if field else None
    model = _model_in(current)
    return list(model.model_fields) if model else []


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted leaf key that the schema declares."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _meaning(key: str, schema: type[BaseModel]) -> str:
    current: Any = schema
    field = None
    for part in key.split("."):
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            break
        field = current.model_fields.get(part)
        current = field.annotation if field else None
    return (field.description or "") if field else ""
