"""How commands that have commands are made: plain help of one style, each command's first sentence in full."""

from __future__ import annotations

from typing import Final

import typer
from typer.core import TyperGroup

LONGEST: Final = 10_000
"""Characters of a sentence; it is wrapped, and never cut."""


class Listing(TyperGroup):
    """A group whose help cuts no sentence off."""

    def format_commands(self, ctx, formatter) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  typer's types are private
        """The table of commands."""
        known = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(LONGEST)) for name, one in known if one is not None and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def group(about: str, cls: type[Listing] = Listing) -> typer.Typer:
    """A command that has commands."""
    return typer.Typer(cls=cls, help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
