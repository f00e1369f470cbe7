"""Run many small cases in one test, which is faster in pytest than one test for each case."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

QUICK = (
    False  # set by conftest.py: only the first case is run, unless the test is marked exhaustive
)


def for_each(names: str, cases: Iterable, *, ids: Iterable[str] | None = None) -> Callable:
    """Run a test for each case, as pytest.mark.parametrize does, but as one test.

    The first failing case ends the test, and a note on the error names the case. All cases share function-scoped fixtures."""
    keys = [name.strip() for name in names.split(",")]
    cases = list(cases)
    labels = list(ids) if ids is not None else [repr(case) for case in cases]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped: BaseException | None = None
            marks = {mark.name for mark in getattr(run, "pytestmark", ())}
            chosen = cases[:1] if QUICK and "exhaustive" not in marks else cases
            done = 0
            for case, label in zip(chosen, labels):
                values = dict(zip(keys, case if len(keys) > 1 else [case], strict=True))
                try:
                    test(**fixtures, **values)
                    done += 1
                except pytest.skip.Exception as error:
                    skipped = error
                except BaseException as error:
                    error.add_note(f"case {names} = {label}")
                    raise
            if skipped and not done:
                raise skipped

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate
