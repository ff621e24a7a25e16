"""Calls that are refused: a row of a table for each, and what is asked of every error."""

import re

import pytest


def bad(message, call, error=RuntimeError):
    """A row: `call` raises `error`, and says `message`, in which "..." stands for anything and a "$" behind it for the
    end. The test is named by the message."""
    return pytest.param(call, error, message, id=message)


def says(text, message):
    pattern = re.escape(message.removesuffix("$")).replace(r"\.\.\.", ".*") + "$" * message.endswith("$")
    assert re.search(pattern, text), text


def check_refused(call, error, message):
    """The error is of that very type, and is one sentence in attnkern's name."""
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    assert raised.type is error
    assert text.startswith("attnkern: ")
    assert "\n" not in text
    assert len(text) < 300
    says(text, message)


def refused(calls):
    """The parameters of a test whose body is `check_refused`."""
    return pytest.mark.parametrize(("call", "error", "message"), list(calls))
