"""Conformance tests for authors of a store or a backend: pytest runs a class that inherits them. Needs pytest.

A law is a test. Its docstring states the law, and a failure of the test repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest

pytest.register_assert_rewrite("relayout.testing.stores", "relayout.testing.backends")

Given = ParamSpec("Given")


class ConformanceError(AssertionError):
    """Raised if a law does not hold. The message contains the law, and what was found."""


def requirement(test: Callable[Given, None]) -> Callable[Given, None]:
    """Add the law, which is the docstring of a test, to the test's failure."""
    text = " ".join(str(test.__doc__).split())

    @functools.wraps(test)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as error:
            raise ConformanceError(f"this law does not hold: {text}\n{type(error).__name__}: {error}") from error

    return checked
