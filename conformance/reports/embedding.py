"""How pages are put together: one file each, everything in it, and nothing an engine says can become markup."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from conformance.version import __version__


def page(name: str, title: str, data: dict[str, Any], *, style: str = "", **context: Any) -> str:
    """The page ``name`` of the templates, with its script and its style, or that of the page ``style``.

    ``data`` is what the script draws.
    """
    return (
        _environment()
        .get_template(f"{name}.html")
        .render(
            version=__version__,
            title=title,
            css=Markup(_text(f"{style or name}.css")),  # noqa: S704 - our own file
            script=Markup(_text(f"{name}.js")),  # noqa: S704 - our own file
            data=_embedded(data),
            **context,
        )
    )


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element it stands in, whatever an engine's message says."""
    text = msgspec.json.encode(data).decode()
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")
    return Markup(text)  # noqa: S704 - escaped above


def _text(name: str) -> str:
    return files("conformance").joinpath("reports").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    """What is put into a template is escaped, and a name it lacks is an error."""
    loader = jinja2.FunctionLoader(_text)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
