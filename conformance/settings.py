"""An `EngineConfig` from words: a preset and ``key=value`` assignments, as the command line and pytest take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from conformance.protocol import ConfigRefused, EngineConfig, OptionValue

OPTION_PREFIX: Final = "engine_options."


class Preset(NamedTuple):
    """A configuration under a name; its fields count as set by the user."""

    fields: dict[str, Any]
    summary: str


PRESETS: Final[dict[str, Preset]] = {
    "neuron": Preset(
        {
            "block_size": 2048,
            "max_model_len": 2048,
            "max_num_batched_tokens": 8192,
            "num_blocks": 4,
            "max_num_seqs": 4,
            "fixed_batch": True,
        },
        "one block holds a whole sequence, and there are as many as sequences (vLLM issue 8007); "
        "on a device of fixed batch, where the engine has one",
    ),
}

_NOT_IN_WORDS = frozenset({"engine_options", "kv_cache_groups"})


def parse_settings(preset: str | None, assignments: Sequence[str]) -> tuple[EngineConfig, frozenset[str]]:
    """The configuration, and the names of the fields that were set; later words win.

    ``engine_options.NAME=value`` sets an option of the engine's own. Raises `ConfigRefused` with the word, what
    was expected and what is known.
    """
    fields: dict[str, Any] = {}
    options: dict[str, OptionValue] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigRefused(f"no preset {preset!r}; expected one of {', '.join(sorted(PRESETS))}")
        fields.update(PRESETS[preset].fields)
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or not name or not text:
            raise ConfigRefused(f"{assignment!r}: expected key=value, for example num_blocks=4")
        if name.startswith(OPTION_PREFIX) and name != OPTION_PREFIX:
            options[name.removeprefix(OPTION_PREFIX)] = _option_value(text)
        else:
            fields[name] = _field_value(name, text)
    if options:
        fields["engine_options"] = options
    names = frozenset(fields)
    if fields.get("fixed_batch"):  # a line of such a device holds a whole sequence, and so does a block
        fields.setdefault("block_size", fields.get("max_model_len", EngineConfig().max_model_len))
    return EngineConfig(**fields), names


def _field_value(name: str, text: str) -> Any:
    kinds = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
    if name not in kinds or name in _NOT_IN_WORDS:
        known = ", ".join(sorted(kinds.keys() - _NOT_IN_WORDS))
        raise ConfigRefused(
            f"{name}={text}: no such field; expected one of {known}, "
            f"and {OPTION_PREFIX}NAME for an engine's own options"
        )
    word: Any = None if text.lower() in {"none", "null"} else text
    try:
        value = msgspec.convert(word, kinds[name], strict=False)
    except msgspec.ValidationError as error:
        problem = re.sub(r"Expected `\w+` >= ([0-9.]+)", r"expected at least \1", str(error))
        raise ConfigRefused(f"{name}={text}: {problem}, got {text}") from None
    return value


def _option_value(text: str) -> OptionValue:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
