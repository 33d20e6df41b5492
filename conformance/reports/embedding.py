"""How pages are put together: one file each, everything in it, and nothing an engine says can become markup."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup


def embedded(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element it stands in, whatever an engine's message says."""
    text = msgspec.json.encode(data).decode()
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")
    return Markup(text)  # noqa: S704 - escaped above


def text_of(name: str) -> str:
    """A template of this package, as text."""
    return files("conformance").joinpath("reports").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> jinja2.Template:
    """A page template; what is put into it is escaped, and a name it lacks is an error."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text_of(name))
