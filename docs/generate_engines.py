"""The page of engines: what was driven of each release, and what it declares there.

    python docs/generate_engines.py                                  writes docs/reference/engines.md from docs/engines.json
    python docs/generate_engines.py --check                          exit 1 when the page is not what would be written
    python docs/generate_engines.py --record ENGINE [OPTION=VALUE]   first asks the engine that is installed here

What a release declares is recorded where the release is installed, because no environment has all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from conformance.engines import BUILT_IN, load
from conformance.execute import probe
from conformance.protocol import ConfigRefused, EngineConfig, OptionValue
from conformance.smoke import OTHER_SHAPES, declared_features

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "engines.json"
PAGE = HERE / "reference" / "engines.md"

_HEAD = """\
# Engines

The releases that adapters have driven, what of each is the engine's own code, and what it declares there.
A feature that is not declared is UNSUPPORTED in a report; the fuzzer draws what is declared, options included.
Sizes are those of the whole environment. The files in `requirements/` are exact and want `pip install --no-deps`.
Made by `python docs/generate_engines.py`.

| engine | release | install | size | the engine's own |
|---|---|---|---|---|
"""


def _record(name: str, options: dict[str, OptionValue]) -> dict[str, Any]:
    """What the installed engine declares, in the first shape it takes, with one thing switched on at a time."""
    factory = load(name).factory
    for size, length in ((4, 32), *OTHER_SHAPES):
        config = EngineConfig(
            num_blocks=64,
            block_size=size,
            max_model_len=length,
            max_num_batched_tokens=4 * length,
            engine_options=options,
        )
        try:
            capabilities = probe(factory, config)
        except ConfigRefused as refusal:
            reason = refusal
            continue
        features = sorted(declared_features(factory, config, capabilities))
        return {
            "release": capabilities.version,
            "features": features,
            "options": sorted(capabilities.options),
            "reimplements": list(capabilities.reimplements),
        }
    raise SystemExit(f"{name} takes none of the shapes tried: {reason}")


def page(records: list[dict[str, Any]]) -> str:
    """The page, from what is recorded."""
    rows = [
        f"| `{one['engine']}` | {one['release']} | {one['install']} | {one['size']} | {one['driven']} |\n"
        for one in records
    ]
    parts = []
    for one in records:
        options = ", ".join(f"`{name}`" for name in one["options"]) or "none"
        told = "".join(f"- {sentence}\n" for sentence in one["reimplements"]) or "- Nothing.\n"
        parts.append(
            f"\n## `{one['engine']}` {one['release']}\n\nDeclares: {', '.join(one['features'])}.\n\n"
            f"Options (`--set engine_options.NAME=…`): {options}.\n\nWhat the adapter does in the engine's stead:\n\n{told}"
        )
    return _HEAD + "".join(rows) + "".join(parts)


def main(words: list[str]) -> None:
    """Record what is asked for, and write the page. Raises SystemExit for words that are not understood."""
    records: list[dict[str, Any]] = json.loads(RECORDS.read_text("utf-8"))
    if words[:1] == ["--record"] and len(words) > 1 and words[1] in BUILT_IN:
        options: dict[str, OptionValue] = {word.partition("=")[0]: word.partition("=")[2] for word in words[2:]}
        found = _record(words[1], options)
        known = [one for one in records if (one["engine"], one["release"]) == (words[1], found["release"])]
        if not known:
            raise SystemExit(f"docs/engines.json has no entry for {words[1]} {found['release']}: add one by hand first")
        known[0].update(found)
        RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")
    elif words == ["--check"]:
        raise SystemExit(PAGE.read_text("utf-8") != page(records))
    elif words:
        raise SystemExit("usage: python docs/generate_engines.py [--record ENGINE [OPTION=VALUE]…]")
    PAGE.write_text(page(records), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
