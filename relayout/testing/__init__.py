"""Laws for whoever adds a store or a backend: a test class inherits them, and pytest runs them. Needs pytest."""

import pytest

pytest.register_assert_rewrite("relayout.testing.stores", "relayout.testing.backends")
