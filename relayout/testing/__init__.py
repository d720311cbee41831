"""Laws for whoever adds a store or a backend: a test class inherits them, and pytest runs them. Needs pytest.

A law is a test whose docstring says it, and whose failure repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest

pytest.register_assert_rewrite("relayout.testing.stores", "relayout.testing.backends")

Given = ParamSpec("Given")


class LawBroken(AssertionError):
    """A law does not hold. The message says which, and what was found."""


def law(test: Callable[Given, None]) -> Callable[Given, None]:
    """Let the failure of a test say the law, which is its docstring."""
    text = " ".join(str(test.__doc__).split())

    @functools.wraps(test)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as error:
            raise LawBroken(f"this law does not hold: {text}\n{type(error).__name__}: {error}") from error

    return checked
