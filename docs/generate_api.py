"""Write docs/reference/api.md and configuration.md from the public names themselves, so that they cannot drift.

python docs/generate_api.py            # write the pages
python docs/generate_api.py --check    # exit 1 when a page is not what would be written
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

import kvconform
from conformance.protocol import EngineConfig
from conformance.settings import PRESETS

FOLDER = Path(__file__).parent / "reference"

API = """\
# Public API

Everything public is importable from `kvconform`; the other packages are how it is built, and may change.
This page is made from the code by `python docs/generate_api.py`.

"""
GROUPS = {
    "Finding engines": ("load", "load_recorded", "installed", "EngineSource", "EngineNotFound"),
    "Running an engine": ("execute", "Execution", "open_session", "Session", "Violation", "Watchdog", "Requirement"),
    "Operations": ("Operation", "Add", "Abort", "AbortEnded", "Step", "Drain", "ResetPrefixCache"),
    "Traces": ("read_trace", "write_trace", "Trace", "TraceError", "replay", "Replay", "explain"),
    "Writing an adapter": ("Engine", "EngineFactory", "EngineConfig", "KVCacheGroup", "Capabilities", "DeviceShape",
                           "OwnModel"),
    "What an engine is told": ("Request", "EncoderItem", "Sampled"),
    "What an engine says": ("StepPlan", "SequencePlan", "BlockMove", "Preemption", "Rejection", "DeviceCall",
                            "CommitResult", "Finished", "Taken", "Usage", "Snapshot"),
    "What an engine raises": ("ConfigRefused", "RequestRefused", "AdapterError"),
}  # fmt: skip
"""What is exported and stands in no group goes under *More*."""

CONFIGURATION = """\
# Configuration

The fields of `EngineConfig`: what an engine is built with, what `--set`, `--kv-set` and the header of a trace name.
Units are blocks for `num_blocks` and `num_swap_blocks`, tokens for everything else.
This page is made from the code by `python docs/generate_api.py`.

"""
MEANINGS = {
    "num_blocks": "blocks of the pool on the device, the null block and other reserved ones included",
    "block_size": "token positions of a block",
    "max_num_seqs": "sequences on the running set, at most",
    "max_num_batched_tokens": "tokens of a step, at most",
    "max_model_len": "tokens of a sequence, prompt and outputs, at most",
    "enable_prefix_caching": "blocks of the same prefix are computed once",
    "enable_chunked_prefill": "a prompt may be computed in several steps",
    "scheduling_policy": "first come first served, or by `Request.priority`, the smaller the more urgent",
    "preemption_mode": "what becomes of the blocks of whoever is thrown out: freed, or copied to the host pool",
    "num_swap_blocks": "blocks of the host pool",
    "sliding_window": "positions that attention looks back",
    "num_lookahead_slots": "slots set aside beyond the known tokens",
    "num_speculative_tokens": "drafts for each sequence and step, at most",
    "watermark": "share of the pool that admission leaves free; an engine that keeps a share of its own does so at 0",
    "pipeline_depth": "steps that may be scheduled before the first of them is committed",
    "encoder_cache_size": "positions of encoder outputs that are kept",
    "fixed_batch": "run on a device of fixed batch and fixed shapes, where the engine has one",
    "kv_cache_groups": "groups of layers with block tables of their own; not settable in words",
    "engine_options": "options of the engine's own: `--set engine_options.NAME=value`; `kvconform engines` lists them",
}
PROBES: dict[str, Any] = {
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "scheduling_policy": "priority",
    "preemption_mode": "swap",
    "num_swap_blocks": 1,
    "sliding_window": 8,
    "num_lookahead_slots": 1,
    "num_speculative_tokens": 1,
    "watermark": 0.1,
    "pipeline_depth": 2,
    "encoder_cache_size": 1,
    "kv_cache_groups": (kvconform.KVCacheGroup("g", 4),),
}
"""A value of each field that only some engines take, to be asked which feature it needs."""


class Member(NamedTuple):
    """A field, property or method as it is written."""

    name: str
    signature: str
    doc: str


# ----------------------------------------------------------------------------------------------------- public API


def api() -> str:
    """The page of the public names."""
    rest = [name for name in kvconform.__all__ if name not in {one for names in GROUPS.values() for one in names}]
    groups = {**GROUPS, "More": tuple(name for name in rest if name != "__version__")}
    parts = [API]
    for title, names in groups.items():
        if names:
            parts.append(f"## {title}\n\n" + "".join(_entry(name) for name in names))
    return "".join(parts).rstrip() + "\n"


def _entry(name: str) -> str:
    found = getattr(kvconform, name)
    if inspect.isfunction(found):
        return f"### {name}\n\n    {_signature(name, found)}\n\n{_prose(found.__doc__)}\n\n"
    if not inspect.isclass(found):
        return f"### {name}\n\n{_prose(_said_of(name)) or '`' + _type(str(found)) + '`'}\n\n"
    lines = [f"### {name}\n\n{_prose(found.__doc__)}\n"]
    rows = [f"| `{one.name}` | `{_bar(one.signature)}` | {_bar(_line(one.doc))} |" for one in _fields(found)]
    if rows:
        lines += ["| field | type and default | |", "|---|---|---|", *rows, ""]
    for method in _methods(found):
        lines.append(f"- `{method.signature}`: {_line(method.doc)}" if method.doc else f"- `{method.signature}`")
    return "\n".join(lines).rstrip() + "\n\n"


def _tree(module: ModuleType, name: str) -> ast.ClassDef | None:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _fields(of: type) -> Iterator[Member]:
    """The fields of a struct, each with the string that stands below it."""
    node = _tree(sys.modules[of.__module__], of.__name__) if issubclass(of, msgspec.Struct) else None
    body = [] if node is None else node.body
    for place, one in enumerate(body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            default = "" if one.value is None else f" = {ast.unparse(one.value)}"
            below = body[place + 1] if place + 1 < len(body) else None
            value = below.value if isinstance(below, ast.Expr) else None
            doc = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
            yield Member(one.target.id, _type(ast.unparse(one.annotation)) + default, doc)


def _methods(of: type) -> Iterator[Member]:
    node = _tree(sys.modules[of.__module__], of.__name__)
    for one in [] if node is None else node.body:
        if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
            continue
        doc = ast.get_docstring(one) or ""
        decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
        if "property" in decorators:
            returns = "" if one.returns is None else f" -> {_type(ast.unparse(one.returns))}"
            yield Member(one.name, f"{one.name}{returns}", doc)
            continue
        one.args.args = [argument for argument in one.args.args if argument.arg not in {"self", "cls"}]
        returns = "" if one.returns is None else f" -> {_type(ast.unparse(one.returns))}"
        yield Member(one.name, f"{one.name}({_type(ast.unparse(one.args))}){returns}", doc)


def _signature(name: str, function: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    returns = "" if node.returns is None else f" -> {_type(ast.unparse(node.returns))}"
    return f"{name}({_type(ast.unparse(node.args))}){returns}"


def _said_of(name: str) -> str:
    """The string that stands below the definition of a type."""
    for module in ("conformance.protocol", "conformance.operations"):
        body = ast.parse(inspect.getsource(sys.modules[module])).body
        for one, below in itertools.pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == name:
                value = below.value if isinstance(below, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    return f"`{_type(ast.unparse(one.value)) if one.value else ''}`\n\n{value.value}"
                return f"`{_type(ast.unparse(one.value)) if one.value else ''}`"
    return ""


def _type(text: str) -> str:
    """Names as readers know them: without modules, and bounds without their wrapping."""
    text = re.sub(r"Annotated\[([^,]+), msgspec\.Meta\(([^)]*)\)\]", r"\1 (\2)", text)
    return re.sub(r"\b(?:conformance|collections|typing)(?:\.\w+)*\.(\w+)", r"\1", text)


def _prose(doc: str | None) -> str:
    """A docstring as markdown: references and double backquotes are code, its paragraphs stay."""
    text = re.sub(r"``?([^`]+)``?", r"`\1`", inspect.cleandoc(doc or ""))
    return text.replace("<", "&lt;")


def _line(doc: str) -> str:
    return " ".join(_prose(doc).split())


def _bar(text: str) -> str:
    return text.replace("|", "\\|")


# -------------------------------------------------------------------------------------------------- configuration


def configuration() -> str:
    """The page of the configuration. Raises KeyError for a field that nobody has explained."""
    lines = [CONFIGURATION, "| field | type | default | meaning | needs |\n|---|---|---|---|---|\n"]
    for field in _fields(EngineConfig):
        kind, _, default = field.signature.partition(" = ")
        needs = ""
        if field.name in PROBES:
            features = sorted(EngineConfig(**{field.name: PROBES[field.name]}).features_needed())
            needs = ", ".join(f"`{feature}`" for feature in features)
        kind, default = (_bar(f"`{part}`") for part in (kind, default))
        lines.append(f"| `{field.name}` | {kind} | {default} | {MEANINGS[field.name]} | {needs} |\n")
    lines.append(
        "\n*Needs*: a feature that the engine must declare; without it the configuration is refused, and what is "
        "about it is UNSUPPORTED.\n`AtLeastOne` and `NotNegative` are bounds that a word of the command line and a "
        "trace are held to.\n\n## Presets\n\n| preset | sets | |\n|---|---|---|\n"
    )
    for name, preset in sorted(PRESETS.items()):
        fields = ", ".join(f"`{field}={value}`" for field, value in preset.fields.items())
        lines.append(f"| `{name}` | {fields} | {preset.summary} |\n")
    return "".join(lines)


PAGES = {"api.md": api, "configuration.md": configuration}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with ``--check`` compare; returns the exit code."""
    if list(arguments) not in ([], ["--check"]):
        print("usage: generate_api.py [--check]", file=sys.stderr)
        return 2
    code = 0
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date; run: python docs/generate_api.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
