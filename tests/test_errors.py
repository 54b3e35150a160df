"""Errors as another process of ours is told them."""

from __future__ import annotations

import pickle

import pytest

from sealnet import errors
from sealnet.errors import Interrupted, KernelRefused, SealnetError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SealnetError)]


def an_error(kind: type[SealnetError]) -> SealnetError:
    if kind is Interrupted:
        return Interrupted(15)
    if kind is KernelRefused:
        return KernelRefused("cannot do it: no", errno=17, hint="try")
    return kind("cannot do it: no", hint="try")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_elsewhere(kind: type[SealnetError]) -> None:
    error = an_error(kind)
    error.add_note("and this stays")

    found = pickle.loads(pickle.dumps(error))

    assert type(found) is kind
    assert vars(found) == vars(error)
    assert (str(found), found.args, found.exit_status) == (str(error), error.args, error.exit_status)
    assert found.__notes__ == ["and this stays"]
