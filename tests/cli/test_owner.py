"""A signature with any content is of an unknown process: its age alone decides."""

import pytest

from lazysnap.export.owner import OwnerState, sign, state_of


@pytest.mark.parametrize(
    "content", [b"", b"x", b"[" * 4000, b'{"host":' * 400 + b"}" * 400, b"[]", b" " * 5000], ids=len
)
def test_what_is_no_signature_is_of_an_unknown_process(content):
    assert state_of(content) is OwnerState.UNKNOWN
    assert state_of(sign("export")) is OwnerState.SELF
