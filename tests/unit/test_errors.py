"""Every error has a response code, a retry flag and a hint."""

import pickle
import traceback
from collections.abc import Iterator

import pytest

from penstock import errors
from penstock.errors import DiskNearlyFull, MessageIllegal, PenstockError
from penstock.wire.codes import RETRYABLE_RESPONSES, ResponseCode


def tree(kind: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_every_error_has_a_known_code_and_a_hint(kind: type[PenstockError]) -> None:
    assert ResponseCode(kind.code)
    assert kind.__doc__
    if kind not in (PenstockError, errors.StoreError, errors.ClientError):
        assert kind.hint


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_retriable_errors_have_codes_that_producers_retry(kind: type[PenstockError]) -> None:
    if kind.retry:
        assert kind.code in RETRYABLE_RESPONSES


def test_a_refusal_names_figure_limit_setting_and_next_step() -> None:
    error = MessageIllegal.over("message body", figure=5, limit=4, setting="message_bytes_max")
    assert (error.figure, error.limit, error.setting) == (5, 4, "message_bytes_max")
    assert str(error) == "message body: 5 bytes, the limit is 4 (message_bytes_max)"
    assert error.remark() == f"{error}; {MessageIllegal.hint}"
    assert error.code == ResponseCode.MESSAGE_ILLEGAL


def test_a_next_step_in_the_reason_of_a_server_is_not_repeated() -> None:
    sent = MessageIllegal("the message has no topic").remark()
    assert errors.refusal(MessageIllegal.code, sent, "a:1").remark() == f"a:1: {sent}"
    of_apache = errors.refusal(MessageIllegal.code, "no topic", "a:1")
    assert of_apache.remark() == "a:1: no topic; correct the message, as the broker refuses it"


def test_the_hint_of_an_instance_does_not_change_the_class() -> None:
    error = DiskNearlyFull("94 % used", hint="mount a larger disk")
    assert error.remark() == "94 % used; mount a larger disk"
    assert DiskNearlyFull.hint != error.hint


def test_an_error_without_a_message_shows_its_class_name() -> None:
    assert DiskNearlyFull().remark().startswith("DiskNearlyFull; ")
    assert PenstockError("no hint").remark() == "no hint"


def test_tracebacks_end_with_the_hint() -> None:
    text = "".join(traceback.format_exception(DiskNearlyFull("94 % used", hint="mount a disk")))
    assert text.endswith("94 % used\nWhat to do: mount a disk\n")
    copied = pickle.loads(pickle.dumps(MessageIllegal("too long")))
    assert copied.__notes__ == [f"What to do: {MessageIllegal.hint}"]
    assert not hasattr(PenstockError("no hint"), "__notes__")
